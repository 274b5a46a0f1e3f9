//! `cleanup`: removes all that is ours from the kernel, and nothing else.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use ipvs_proxy_core::op::Outcome;
use ipvs_proxy_core::planner::Planner;
use ipvs_proxy_dataplane::growth::GROWING;
use ipvs_proxy_dataplane::kernel::Kernel;
use ipvs_proxy_netlink::{Causes, Family};

use crate::cli::Cleanup;
use crate::place::Place;
use crate::say;

/// How often the kernel is read again when it is not as it was read.
const READINGS: usize = 5;
/// How long UDP flows may take to be forgotten.
const FLOWS_WAIT: Duration = Duration::from_secs(5);

/// Removes what is ours, but for virtual servers in excluded networks; how many things that were.
/// What can't be removed is told on stderr, a line each, and stops nothing else.
///
/// # Errors
/// When a daemon runs here, when the kernel can't be read, or when something is left.
pub fn cleanup(flags: &Cleanup) -> Result<usize> {
    let _alone = Place::here()?.lock()?;
    let mut kernel = Kernel::open(&Family::ALL, flags.iptables_backend)?;
    let mut planner = Planner::of_nothing(flags.ipvs_exclude_cidrs.clone());
    let (mut removed, mut left) = (0, 0);
    match kernel.remove_leftover() {
        Ok(found) => removed += usize::from(found),
        Err(error) => {
            left += 1;
            say(format_args!(
                "ipvs-proxy: remove set {GROWING}: {}",
                Causes(&error)
            ));
        }
    }
    let (there, unread) = kernel.read_whatever()?;
    for why in unread {
        left += 1;
        say(format_args!("ipvs-proxy: {why}"));
    }
    planner.resync(there, true, Instant::now());
    let mut readings = 0;
    loop {
        // What is not as it was read changes meanwhile.
        if planner.in_doubt() && readings < READINGS {
            readings += 1;
            planner.resync(kernel.read_whatever()?.0, true, Instant::now());
        }
        let step = planner.step(&mut kernel, &Instant::now);
        for (op, outcome) in step.ops {
            match outcome {
                Outcome::Done => removed += 1,
                Outcome::Started => {}
                Outcome::Failed(failure) => {
                    left += 1;
                    say(format_args!("ipvs-proxy: {op}: {failure}"));
                }
            }
        }
        if step.rests || planner.in_doubt() && readings == READINGS {
            break;
        }
    }
    if !kernel.finish_flows(FLOWS_WAIT) {
        left += 1;
        say(
            "ipvs-proxy: UDP flows could not be forgotten: they go on to where they went until they end",
        );
    }
    for held in kernel.held_chains() {
        left += 1;
        say(format_args!("ipvs-proxy: {held}"));
    }
    match left {
        0 => Ok(removed),
        _ => Err(anyhow!("{removed} things removed, {left} left")),
    }
}
