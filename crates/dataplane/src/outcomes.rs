//! What the kernel's answers mean for the planner.

use ipvs_proxy_core::op::{Failure, FailureKind, Op, Outcome, ReadError};
use ipvs_proxy_netlink::Error as NetlinkError;

use crate::links::LinkError;

pub(crate) fn outcome_of_server(op: &Op, result: Result<(), ipvs_netlink::Error>) -> Outcome {
    use ipvs_netlink::Error;
    let Err(error) = result else {
        return Outcome::Done;
    };
    let kind = match (&error, op) {
        (Error::NoVirtualServer { .. } | Error::NoRealServer { .. }, Op::Remove(_)) => {
            return Outcome::Done;
        }
        (Error::Exists { .. } | Error::NoVirtualServer { .. } | Error::NoRealServer { .. }, _) => {
            FailureKind::Drift
        }
        (Error::Overrun { .. }, _) => FailureKind::Unknown,
        (Error::NoModule | Error::NoScheduler { .. }, _) => FailureKind::Node,
        (Error::Kernel { source, .. }, _) => kind_of_errno(source.code),
        (Error::Transport { source, .. }, _) => kind_of_transport(source),
        _ => FailureKind::Refused,
    };
    failed(kind, &error)
}

pub(crate) fn outcome_of_set(op: &Op, result: Result<(), ipset_rs::Error>) -> Outcome {
    use ipset_rs::Error;
    let Err(error) = result else {
        return Outcome::Done;
    };
    let kind = match (&error, op) {
        (Error::NoSet, Op::Remove(_)) => return Outcome::Done,
        (Error::NoSet, _) => FailureKind::Drift,
        (Error::Overrun, _) => FailureKind::Unknown,
        (Error::Busy, _) => FailureKind::Busy,
        (Error::NoModule { .. }, _) => FailureKind::Node,
        (Error::Kernel(source), _) => kind_of_errno(source.code),
        (Error::Transport(source), _) => kind_of_transport(source),
        _ => FailureKind::Refused,
    };
    failed(kind, &error)
}

pub(crate) fn outcome_of_link(result: Result<(), LinkError>) -> Outcome {
    let Err(error) = result else {
        return Outcome::Done;
    };
    let kind = match error.kernel() {
        Some(NetlinkError::Kernel(refusal)) if refusal.code == ENODEV => FailureKind::Drift,
        Some(NetlinkError::Kernel(refusal)) => kind_of_errno(refusal.code),
        Some(error) => kind_of_transport(error),
        None => FailureKind::Refused,
    };
    failed(kind, &error)
}

const EAGAIN: i32 = 11; // <asm-generic/errno-base.h>
const ENOMEM: i32 = 12; // <asm-generic/errno-base.h>
const EBUSY: i32 = 16; // <asm-generic/errno-base.h>
const ENODEV: i32 = 19; // <asm-generic/errno-base.h>

fn kind_of_errno(code: i32) -> FailureKind {
    match code {
        EAGAIN | ENOMEM | EBUSY => FailureKind::Busy,
        _ => FailureKind::Refused,
    }
}

fn kind_of_transport(error: &NetlinkError) -> FailureKind {
    match error {
        NetlinkError::Kernel(refusal) => kind_of_errno(refusal.code),
        NetlinkError::Overrun | NetlinkError::Decode(_) | NetlinkError::Interrupted => {
            FailureKind::Unknown
        }
        _ => FailureKind::Busy,
    }
}

/// The failure with the errors behind it.
pub(crate) fn failed(kind: FailureKind, error: &dyn std::fmt::Display) -> Outcome {
    Outcome::Failed(Failure {
        kind,
        text: error.to_string(),
    })
}

pub(crate) fn unread(error: &dyn std::fmt::Display) -> ReadError {
    ReadError(error.to_string())
}
