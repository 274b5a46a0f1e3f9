//! The timeouts of IPVS, kept as they must be.

use std::time::Duration;

use ipvs_netlink::{Client, Error};

/// Keeps the timeouts of the network namespace in which it was opened. They hold for all of its
/// virtual servers, whoever made them.
#[derive(Debug)]
pub struct Timeouts {
    kept: Option<(Client, ipvs_netlink::Timeouts)>,
}

impl Timeouts {
    /// What must be kept; zero leaves a timeout as it is, and all zero needs no IPVS.
    ///
    /// # Errors
    /// If the kernel has no IPVS.
    pub fn open(wanted: ipvs_netlink::Timeouts) -> Result<Timeouts, Error> {
        let any = [wanted.tcp, wanted.tcp_fin, wanted.udp]
            .iter()
            .any(|timeout| !timeout.is_zero());
        let kept = any.then(|| Ok((Client::open()?, wanted)));
        Ok(Timeouts {
            kept: kept.transpose()?,
        })
    }

    /// Sets them if one differs; what they were then.
    ///
    /// # Errors
    /// If they can't be read or set.
    pub fn keep(&mut self) -> Result<Option<ipvs_netlink::Timeouts>, Error> {
        let Some((client, wanted)) = &mut self.kept else {
            return Ok(None);
        };
        let present = client.timeouts()?;
        let pairs = [
            (present.tcp, wanted.tcp),
            (present.tcp_fin, wanted.tcp_fin),
            (present.udp, wanted.udp),
        ];
        // The kernel counts whole seconds: the rest of one counts as one.
        let whole = |time: Duration| time.as_secs() + u64::from(time.subsec_nanos() > 0);
        let differs = |(present, wanted): &(Duration, Duration)| {
            !wanted.is_zero() && whole(*present) != whole(*wanted)
        };
        if !pairs.iter().any(differs) {
            return Ok(None);
        }
        client.set_timeouts(wanted)?;
        Ok(Some(present))
    }
}
