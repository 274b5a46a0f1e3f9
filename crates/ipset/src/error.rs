//! What can go wrong with a set.

use ipvs_proxy_netlink::KernelError;

use crate::SetType;
use crate::codec::{
    IPSET_ERR_BUSY, IPSET_ERR_EXIST_SETNAME2, IPSET_ERR_FIND_TYPE, IPSET_ERR_HASH_FULL,
    IPSET_ERR_REFERENCED, IPSET_ERR_TYPE_SPECIFIC, private_error_name,
};
use crate::{Change, Entry};

const EPERM: i32 = 1; // <asm-generic/errno-base.h>
const ENOENT: i32 = 2; // <asm-generic/errno-base.h>
const EBUSY: i32 = 16; // <asm-generic/errno-base.h>
const EEXIST: i32 = 17; // <asm-generic/errno-base.h>

/// Why a change or a question failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is no set of this name (`ENOENT`).
    #[error("no such set")]
    NoSet,
    /// A set of this name exists, with another type or other limits (`EEXIST`). It is unchanged.
    #[error("a set of this name exists with another type or other limits")]
    Exists,
    /// A rule or another set uses the set, or somebody lists it (`IPSET_ERR_BUSY`,
    /// `IPSET_ERR_REFERENCED`; `EBUSY` of a swap).
    #[error("the set is in use by a rule, another set or a listing")]
    Busy,
    /// The set has as many entries as it may (`IPSET_ERR_HASH_FULL`).
    #[error("the set is full")]
    Full,
    /// The kernel lacks ipset, or this type of set (`IPSET_ERR_FIND_TYPE`).
    #[error("the kernel has no {what}; modprobe {module}")]
    NoModule {
        /// What is missing: `ipset` or a type's name.
        what: &'static str,
        /// The kernel module that would have it.
        module: &'static str,
    },
    /// The entry or the set's description is refused; the text is the kernel's constant, such as
    /// `IPSET_ERR_INVALID_CIDR`.
    #[error("refused as invalid: {0}")]
    Invalid(&'static str),
    /// A value that the kernel would take for another one, so it is not sent.
    #[error("{field} is {value}: {must}")]
    Value {
        /// The field of the [`crate::SetSpec`] or [`crate::Options`], or the entry's.
        field: &'static str,
        /// What it has.
        value: String,
        /// What it must be.
        must: &'static str,
    },
    /// The process lacks `CAP_NET_ADMIN` in the user namespace that owns the network namespace.
    #[error("not permitted: CAP_NET_ADMIN is missing")]
    Permission,
    /// Any other refusal.
    #[error(transparent)]
    Kernel(KernelError),
    /// The kernel's answer was lost: the change may be done or not. List and compare.
    #[error("the kernel's answer was lost")]
    Overrun,
    /// The socket failed or the answer can't be read.
    #[error(transparent)]
    Transport(ipvs_proxy_netlink::Error),
}

impl From<ipvs_proxy_netlink::Error> for Error {
    fn from(error: ipvs_proxy_netlink::Error) -> Error {
        match error {
            ipvs_proxy_netlink::Error::Overrun => Error::Overrun,
            ipvs_proxy_netlink::Error::Kernel(refusal) => match refusal.code {
                EPERM => Error::Permission,
                ENOENT => Error::NoSet,
                EEXIST => Error::Exists,
                IPSET_ERR_BUSY | IPSET_ERR_REFERENCED => Error::Busy,
                code => match private_error_name(code) {
                    Some(name) => Error::Invalid(name),
                    None => Error::Kernel(refusal),
                },
            },
            other => Error::Transport(other),
        }
    }
}

impl Error {
    /// The error with what only the change tells: the type, and whose the codes from 4352 are.
    pub(crate) fn of(error: ipvs_proxy_netlink::Error, change: &Change) -> Error {
        let code = match &error {
            ipvs_proxy_netlink::Error::Kernel(refusal) => refusal.code,
            _ => 0,
        };
        match change {
            Change::Create(spec) if code == IPSET_ERR_FIND_TYPE => Error::no_type(spec.kind),
            // Types give the codes from 4352 meanings of their own.
            Change::Add(_, Entry::Port(_))
            | Change::AddWith(_, Entry::Port(_), _)
            | Change::Remove(_, Entry::Port(_))
                if code == IPSET_ERR_TYPE_SPECIFIC =>
            {
                Error::Invalid("IPSET_ERR_BITMAP_RANGE")
            }
            Change::Add(..) | Change::AddWith(..) if code == IPSET_ERR_HASH_FULL => Error::Full,
            // Of a rename it means the contrary.
            Change::Swap(..) if code == IPSET_ERR_EXIST_SETNAME2 => Error::NoSet,
            Change::Swap(..) if code == EBUSY => Error::Busy,
            _ => Error::from(error),
        }
    }

    pub(crate) fn no_type(kind: SetType) -> Error {
        Error::NoModule {
            what: kind.name(),
            module: kind.module(),
        }
    }

    /// The refusal is about the set or the process, so every entry of a message has it.
    pub(crate) fn concerns_all_entries(&self) -> bool {
        !matches!(
            self,
            Error::Full | Error::Invalid(_) | Error::Kernel(_) | Error::Value { .. }
        )
    }
}
