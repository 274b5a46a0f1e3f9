//! `run`: sets the process up and hands over to the [`Controller`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use anyhow::{Context, Result, anyhow};
use ipvs_proxy_core::model::Change;
use ipvs_proxy_core::planner::Planner;
use ipvs_proxy_dataplane::addresses;
use ipvs_proxy_dataplane::kernel::Kernel;
use ipvs_proxy_netlink::Family;
use nix::sys::signal::{SigSet, Signal};
use tracing::{info, warn};

use crate::cli::Run;
use crate::controller::{Controller, Event, Settings};
use crate::drains::Drains;
use crate::manifests::{self, Source};
use crate::place::{LockError, Place};

/// Runs until SIGTERM or SIGINT. The kernel's state stays in place.
///
/// # Errors
/// What makes work impossible: no IPVS, no ipset, no iptables, no privilege, a scheduler that
/// the kernel has not.
pub fn run(flags: &Run) -> Result<()> {
    let (sender, events) = sync_channel(16);
    // Before any other thread starts, so that all of them leave these signals alone.
    let stop = stop_on_signals(sender.clone())?;

    let families = families();
    let mut kernel = Kernel::open(&families, flags.iptables_backend)?;
    // Without a folder of its own the daemon does all but keep deadlines over a restart.
    let place = Place::here().map_err(|error| warn!("{error:#}; drains begin anew at a restart"));
    let place = place.ok();
    let _alone = match place.as_ref().map(Place::lock) {
        Some(Err(error @ LockError::Taken(_))) => return Err(error.into()),
        Some(Err(error)) => {
            warn!("{error:#}; a second daemon would not be noticed");
            None
        }
        Some(Ok(alone)) => Some(alone),
        None => None,
    };
    kernel.require_scheduler(flags.shape.scheduler)?;
    let mut config = flags
        .shape
        .config(&families)
        .map_err(|error| anyhow!(error))?;
    config.random_fully = kernel.tools().version().has_random_fully();

    let node_name = match &flags.node_name {
        Some(name) => name.clone(),
        None => host_name()?,
    };
    let node = flags.shape.node();
    let (changes, busy) =
        manifests::watch(&flags.manifests).context("manifests can't be watched")?;
    let source = Source::new(flags.manifests.clone(), &node_name, node.is_none()).leaving(busy);
    let mut planner = Planner::new(config);
    if let Some(node) = node {
        planner.apply(Change::Node(node));
    }
    forward(changes, sender.clone())?;
    addresses::watch(move |notices| sender.send(Event::Addresses(notices)).is_ok())?;
    let settings = Settings {
        follow_addresses: flags.shape.node_ips.is_empty(),
        stop,
        sync_period: flags.sync_period,
        strict_arp: flags.ipvs_strict_arp,
        drift: flags.drift,
        drains: place.map(|place| Drains::new(&place.file("drains.json"))),
    };
    info!(
        node = node_name,
        scheduler = %flags.shape.scheduler,
        iptables = %kernel.tools().backend(),
        families = families.len(),
        "started"
    );
    if flags
        .shape
        .nodeport_addresses
        .iter()
        .any(|word| word.trim() == "localhost")
    {
        warn!("--nodeport-addresses localhost: IPVS serves no node port on loopback addresses");
    }
    if families.len() == 1 {
        warn!("IPv6 is switched off on this node: IPv4 only");
    }
    Controller::new(source, planner, kernel, settings).run(&events);
    Ok(())
}

/// IPv4, and IPv6 unless the node has none.
fn families() -> Vec<Family> {
    if std::path::Path::new("/proc/net/if_inet6").exists() {
        Family::ALL.to_vec()
    } else {
        vec![Family::V4]
    }
}

/// The host's name in lower case, as kubelet names its Node.
fn host_name() -> Result<String> {
    let name =
        nix::unistd::gethostname().context("the host name can't be read: give --node-name")?;
    let name = name.to_string_lossy().trim().to_lowercase();
    if name.is_empty() {
        Err(anyhow!("the host has no name: give --node-name"))
    } else {
        Ok(name)
    }
}

/// Tells the loop to stop on SIGTERM and SIGINT: by the flag in the middle of its work, by the event
/// when it waits.
fn stop_on_signals(sender: SyncSender<Event>) -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block().context("signals can't be blocked")?;
    let wait = move || {
        if signals.wait().is_ok() {
            flag.store(true, Ordering::Relaxed);
            // The loop may have ended already.
            let _ = sender.send(Event::Stop);
        }
    };
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(wait)?;
    Ok(stop)
}

fn forward(changes: Receiver<()>, sender: SyncSender<Event>) -> Result<()> {
    let forward = move || {
        for () in changes {
            if sender.send(Event::Manifests).is_err() {
                return;
            }
        }
    };
    thread::Builder::new()
        .name("manifests-events".to_owned())
        .spawn(forward)?;
    Ok(())
}
