//! `run`: sets the process up and hands over to the [`Controller`].

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use anyhow::{Context, Result, anyhow};
use ipvs_proxy_core::model::{Change, Node};
use ipvs_proxy_core::planner::Planner;
use ipvs_proxy_dataplane::kernel::Kernel;
use ipvs_proxy_dataplane::sysctl;
use ipvs_proxy_netlink::Family;
use nix::sys::signal::{SigSet, Signal};
use tracing::{error, info, warn};

use crate::cli::Run;
use crate::controller::{Controller, Event};
use crate::manifests::{self, Source};

/// Runs until SIGTERM or SIGINT. The kernel's state stays in place.
///
/// # Errors
/// What makes work impossible: no IPVS, no ipset, no iptables, no privilege, a scheduler that
/// the kernel has not.
pub fn run(flags: &Run) -> Result<()> {
    let (sender, events) = sync_channel(16);
    // Before any other thread starts, so that all of them leave these signals alone.
    stop_on_signals(sender.clone())?;

    let families = families();
    let mut kernel = Kernel::open(&families, flags.iptables_backend)?;
    kernel.require_scheduler(flags.shape.scheduler)?;
    let mut config = flags.shape.config(&families).map_err(|error| anyhow!(error))?;
    config.random_fully = kernel.tools().version().has_random_fully();
    for failure in sysctl::set() {
        error!(error = %failure.source, "{failure}");
    }

    let node_name = match &flags.node_name {
        Some(name) => name.clone(),
        None => host_name()?,
    };
    let addresses = flags.shape.node_addresses();
    let source = Source::new(flags.manifests.clone(), &node_name, addresses.is_none());
    let mut planner = Planner::new(config);
    if let Some(addresses) = addresses {
        planner.apply(Change::Node(Node { addresses }));
    }
    let changes = manifests::watch(&flags.manifests).context("manifests can't be watched")?;
    forward(changes, sender)?;
    info!(
        node = node_name,
        scheduler = %flags.shape.scheduler,
        iptables = %kernel.tools().backend(),
        families = families.len(),
        "started"
    );
    if families.len() == 1 {
        warn!("IPv6 is switched off on this node: IPv4 only");
    }
    Controller::new(source, planner, kernel).run(&events);
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
    let name = nix::unistd::gethostname().context("the host name can't be read: give --node-name")?;
    let name = name.to_string_lossy().trim().to_lowercase();
    if name.is_empty() { Err(anyhow!("the host has no name: give --node-name")) } else { Ok(name) }
}

fn stop_on_signals(sender: SyncSender<Event>) -> Result<()> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block().context("signals can't be blocked")?;
    let wait = move || {
        if signals.wait().is_ok() {
            // The loop may have ended already.
            let _ = sender.send(Event::Stop);
        }
    };
    thread::Builder::new().name("signals".to_owned()).spawn(wait)?;
    Ok(())
}

fn forward(changes: Receiver<()>, sender: SyncSender<Event>) -> Result<()> {
    let forward = move || {
        for () in changes {
            if sender.send(Event::Manifests).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("manifests-events".to_owned()).spawn(forward)?;
    Ok(())
}
