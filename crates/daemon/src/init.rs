//! What is set up before the daemon works, and needs more privilege than it: modules, sysctls and
//! the link (`run --init-only`). With that done, `run` needs `CAP_NET_ADMIN` and `CAP_NET_RAW`.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use anyhow::{Result, anyhow};
use ipvs_proxy_core::op::{Dataplane as _, Op, Outcome};
use ipvs_proxy_core::state::{Key, Set, Value};
use ipvs_proxy_dataplane::kernel::Kernel;
use ipvs_proxy_dataplane::modules;
use ipvs_proxy_dataplane::sysctl::{self, StrictArp};
use ipvs_proxy_dataplane::timeouts::Timeouts;
use ipvs_proxy_netlink::{Causes, Family};
use nix::unistd::{SysconfVar, sysconf};
use tracing::{debug, error, info, warn};

use crate::config::{Conntrack, Settings};
use crate::place::Place;

const OOM_SCORE_ADJ: &str = "/proc/self/oom_score_adj";

/// Loads modules, sets sysctls and IPVS's timeouts, makes our sets, which are empty, and the link.
/// All of it is tried; what fails is logged as it comes.
///
/// # Errors
/// When something is not as it must be.
pub fn init(settings: &Settings) -> Result<()> {
    let mut failed = 0;
    let mut must = |result: Result<(), String>| {
        if let Err(text) = result {
            failed += 1;
            error!("{text}");
        }
    };
    let sets_of =
        |families: &[Family]| -> Vec<Set> { families.iter().flat_map(|f| Set::all(*f)).collect() };
    let scheduler = settings.config.scheduler;
    let mut modules: BTreeSet<String> = sets_of(&Family::ALL)
        .iter()
        .map(|set| module_of(set.kind().name()))
        .collect();
    modules.insert(format!("ip_vs_{scheduler}"));
    for name in [
        "ip_vs",
        "ip_set",
        "xt_set",
        "nf_conntrack",
        "nf_conntrack_netlink",
        "dummy",
    ] {
        modules.insert(name.to_owned());
    }
    for name in &modules {
        // What needs it says whether it is built in; nothing here needs xt_set.
        if let Err(why) = modules::load(name) {
            warn!("module {name}: {why}; it is needed unless the kernel has it built in");
        }
    }
    keep_strict_arp(settings, Place::here().ok().as_ref());
    for failure in conntrack(settings)
        .set()
        .into_iter()
        .chain(sysctl::set(settings.strict_arp))
    {
        must(Err(Causes(&failure).to_string()));
    }
    match Kernel::open(&Family::ALL, settings.iptables_backend) {
        Err(error) => must(Err(Causes(&error).to_string())),
        Ok(mut kernel) => {
            // This loads the tables of iptables, too.
            if let Some(why) = kernel.keep_working_families() {
                warn!("IPv4 only: {why}");
            }
            must(
                kernel
                    .require_scheduler(scheduler)
                    .map_err(|error| Causes(&error).to_string()),
            );
            match kernel.read_whatever() {
                Err(error) => must(Err(error.to_string())),
                Ok((there, unread)) => {
                    unread.into_iter().for_each(|why| must(Err(why)));
                    let sets = sets_of(kernel.families());
                    let keys = sets.iter().map(|set| Key::Set(*set)).chain([Key::Link]);
                    let ops: Vec<Op> = keys
                        .filter(|key| there.get(key) != Some(&Value::Present))
                        .map(|key| Op::Add(key, Value::Present))
                        .collect();
                    for (op, outcome) in ops.iter().zip(kernel.apply(&ops)) {
                        must(match outcome {
                            Outcome::Done | Outcome::Started => Ok(()),
                            Outcome::Failed(failure) => Err(format!("{op}: {failure}")),
                        });
                    }
                }
            }
            let kept = Timeouts::open(settings.timeouts).and_then(|mut timeouts| timeouts.keep());
            must(kept.map(drop).map_err(|e| format!("{:#}", anyhow!(e))));
        }
    }
    match failed {
        0 => {
            info!("modules, sysctls, sets and link are as they must be");
            Ok(())
        }
        _ => Err(anyhow!("not all is as it must be: {failed} failures")),
    }
}

/// Notes what strict ARP is going to change, or puts that back where it is not wanted any more.
pub(crate) fn keep_strict_arp(settings: &Settings, place: Option<&Place>) {
    let Some(place) = place else { return };
    let record = place.file("strict-arp");
    if let Err(error) = StrictArp::new(&record).keep(settings.strict_arp) {
        match settings.strict_arp {
            true => {
                warn!(error = %Causes(&error), "what strict ARP changes can't be noted: its end will not put it back")
            }
            false => {
                warn!(error = %Causes(&error), "what strict ARP changed could not be put back")
            }
        }
    }
}

/// Makes the process the last one to be killed where memory is short.
pub(crate) fn adjust_oom_score(settings: &Settings) {
    let adjusted = settings.oom_score_adj.to_string();
    let present = fs::read_to_string(OOM_SCORE_ADJ).unwrap_or_default();
    if present.trim() != adjusted
        && let Err(error) = fs::write(OOM_SCORE_ADJ, &adjusted)
    {
        // To lower it needs CAP_SYS_RESOURCE, which the container runtime has; kubelet lowers it for critical pods.
        let present = present.trim();
        if present.starts_with('-') {
            debug!(error = %Causes(&error), wanted = adjusted, present, "oom_score_adj stays");
        } else {
            info!(error = %Causes(&error), wanted = adjusted, present, "oom_score_adj stays");
        }
    }
}

/// The sysctls of connection tracking.
pub(crate) fn conntrack(settings: &Settings) -> sysctl::Once {
    let Conntrack {
        tcp_established,
        tcp_close_wait,
        tcp_be_liberal,
        udp,
        udp_stream,
        ..
    } = settings.conntrack;
    let processors = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten();
    let processors = processors.and_then(|n| u32::try_from(n).ok()).unwrap_or(1);
    let seconds = |time: Duration| Some(time.as_secs()).filter(|seconds| *seconds > 0);
    sysctl::Once::conntrack(&sysctl::Conntrack {
        max: settings.conntrack.max(processors),
        tcp_established_s: seconds(tcp_established),
        tcp_close_wait_s: seconds(tcp_close_wait),
        tcp_be_liberal,
        udp_s: seconds(udp),
        udp_stream_s: seconds(udp_stream),
    })
}

/// The module of a type of sets: `ip_set_hash_ipport` of `hash:ip,port`.
fn module_of(set_type: &str) -> String {
    format!("ip_set_{}", set_type.replace(':', "_").replace(',', ""))
}
