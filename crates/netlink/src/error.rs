//! What can go wrong between us and the kernel.

use std::fmt;

use nix::errno::Errno;

/// Why a request has no good answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A system call on the socket failed; no request of this call was carried out.
    #[error("{call}: {}", Errno::from_raw(*errno))]
    Socket {
        /// The system call or socket option.
        call: &'static str,
        /// The errno that it set, positive.
        errno: i32,
    },
    /// The answer was lost (`ENOBUFS`, or none within ten seconds). The kernel may have carried
    /// the request out or not: list and compare.
    #[error("the kernel's answer was lost")]
    Overrun,
    /// The kernel refused the request.
    #[error(transparent)]
    Kernel(KernelError),
    /// The kernel has no generic netlink family of this name, mostly because its module is not
    /// loaded.
    #[error("the kernel has no generic netlink family {name:?}")]
    NoFamily {
        /// The name that was asked for.
        name: String,
    },
    /// The table changed during the listing (`NLM_F_DUMP_INTR`): the list may lack entries or
    /// have them twice. List again.
    #[error("the table changed while it was listed")]
    Interrupted,
    /// The kernel's answer does not have the form it should have.
    #[error("the kernel's answer can't be read: {0}")]
    Decode(&'static str),
    /// A value or a nested attribute is longer than the 65 535 bytes that an attribute can hold.
    #[error("the request does not fit into a netlink attribute")]
    TooLong,
}

/// A refusal by the kernel, from an `NLMSG_ERROR` message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct KernelError {
    /// A positive errno, or a subsystem's own code (ipset counts from 4096).
    pub code: i32,
    /// The kernel's explanation (`NLMSGERR_ATTR_MSG` of `<linux/netlink.h>`), when it gave one.
    pub message: Option<String>,
}

/// `ENOENT: No such file or directory`, with the kernel's explanation in brackets.
impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Errno::from_raw(self.code) {
            Errno::UnknownErrno => write!(f, "code {}", self.code)?,
            errno => write!(f, "{errno}")?,
        }
        match &self.message {
            Some(message) => write!(f, " ({message})"),
            None => Ok(()),
        }
    }
}

/// An error in one line with the errors behind it, each said once: how every error is logged.
///
/// ```
/// use ipvs_proxy_netlink::Causes;
///
/// let missing = std::fs::File::open("/missing").unwrap_err();
/// assert_eq!(Causes(&missing).to_string(), "No such file or directory (os error 2)");
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Causes<'a>(pub &'a (dyn std::error::Error + 'a));

impl fmt::Display for Causes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = self.0.to_string();
        f.write_str(&said)?;
        let causes = std::iter::successors(self.0.source(), |cause| cause.source());
        for cause in causes.map(ToString::to_string) {
            // Many say what is behind them in their own words.
            if !said.contains(&cause) {
                write!(f, ": {cause}")?;
                said.push_str(&cause);
            }
        }
        Ok(())
    }
}

/// The name of an errno, such as `ENOENT`; the number for a code that is no errno.
#[must_use]
pub fn errno_name(code: i32) -> String {
    match Errno::from_raw(code) {
        Errno::UnknownErrno => code.to_string(),
        errno => format!("{errno:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Layer {
        #[error("the upper one")]
        Hides(#[source] Box<Layer>),
        #[error("the middle one: {0}")]
        Says(#[source] Box<Layer>),
        #[error(transparent)]
        Lets(#[from] std::io::Error),
    }

    #[test]
    fn an_error_says_each_cause_once() {
        let refused = || std::io::Error::from_raw_os_error(13);
        let says = Layer::Says(Box::new(refused().into()));
        let middle = "the middle one: Permission denied (os error 13)";
        assert_eq!(Causes(&says).to_string(), middle);
        let hides = Layer::Hides(Box::new(says));
        assert_eq!(
            Causes(&hides).to_string(),
            format!("the upper one: {middle}")
        );
        let hides = Layer::Hides(Box::new(refused().into()));
        assert_eq!(
            Causes(&hides).to_string(),
            "the upper one: Permission denied (os error 13)"
        );
    }

    #[test]
    fn refusals_name_the_errno_and_the_explanation() {
        let plain = KernelError {
            code: 2,
            message: None,
        };
        assert_eq!(plain.to_string(), "ENOENT: No such file or directory");
        let explained = KernelError {
            code: 22,
            message: Some("no such device".to_owned()),
        };
        assert_eq!(
            explained.to_string(),
            "EINVAL: Invalid argument (no such device)"
        );
        assert_eq!(
            KernelError {
                code: 4101,
                message: None
            }
            .to_string(),
            "code 4101"
        );
        assert_eq!(
            (errno_name(17), errno_name(4101)),
            ("EEXIST".to_owned(), "4101".to_owned())
        );
    }
}
