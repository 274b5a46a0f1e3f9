//! `run`: sets the process up and hands over to the [`Controller`].

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use ipvs_netlink::Scheduler;
use ipvs_proxy_core::model::Change;
use ipvs_proxy_core::planner::Planner;
use ipvs_proxy_dataplane::addresses;
use ipvs_proxy_dataplane::growth::GROWING;
use ipvs_proxy_dataplane::kernel::Kernel;
use ipvs_proxy_dataplane::notices;
use ipvs_proxy_dataplane::sysctl;
use ipvs_proxy_dataplane::timeouts::Timeouts;
use ipvs_proxy_iptables::{Backend, Choice, Tools};
use ipvs_proxy_netlink::{Causes, Family};
use nix::sys::signal::{SigSet, Signal};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tracing::{error, info, warn};

use crate::api::{self, Access};
use crate::cli::Run;
use crate::config::{self, Loaded, Objects, Settings};
use crate::controller::{self, Controller, Event};
use crate::drains::Drains;
use crate::events::{self, Finding};
use crate::init;
use crate::manifests::{self, Source};
use crate::place::{LockError, Place};
use crate::serve::ports::HealthPorts;
use crate::serve::{self, Listen, Status};
use crate::surroundings::Surroundings;

/// Runs until SIGTERM or SIGINT. The kernel's state stays in place.
///
/// # Errors
/// What makes work impossible: no IPVS, no ipset, no iptables, no privilege, a scheduler that
/// the kernel has not.
pub fn run(loaded: &Loaded, flags: &Run) -> Result<()> {
    let settings = &loaded.settings;
    let (sender, events) = sync_channel(16);
    // Before any other thread starts, so that all of them leave these signals alone.
    let begun = Arc::new(AtomicBool::new(false));
    let stop = stop_on_signals(sender.clone(), Arc::clone(&begun))?;
    let (runtime, access) = reach(settings)?;

    let mut kernel = open(
        settings.iptables_backend,
        settings.config.scheduler,
        &sender,
    )?;
    let families = kernel.families().to_vec();
    // Without a folder of its own the daemon does all but keep deadlines over a restart.
    let place = Place::here().map_err(|error| {
        warn!(error = %Causes(error.as_ref()), "drains begin anew at a restart");
    });
    let place = place.ok();
    let _alone = match place.as_ref().map(Place::lock) {
        Some(Err(error @ LockError::Taken(_))) => return Err(error.into()),
        Some(Err(error)) => {
            warn!(error = %Causes(&error), "a second daemon would not be noticed");
            None
        }
        Some(Ok(alone)) => Some(alone),
        None => None,
    };
    match kernel.remove_leftover() {
        Ok(true) => info!(set = GROWING, "removed what a crash left"),
        Ok(false) => {}
        Err(error) => {
            warn!(set = GROWING, error = %Causes(&error), "a set that is in the way could not be removed")
        }
    }
    let mut config = settings.config.clone();
    let scheduler = config.scheduler;
    config.families.clone_from(&families);

    let node_name = match &settings.node_name {
        Some(name) => name.clone(),
        None => host_name()?,
    };
    config.node_name = node_name.as_str().into();
    let node = settings.node();
    let from_api = !matches!(settings.objects, Objects::Manifests(_));
    let status = Status::new(
        &families,
        settings.sync_period,
        from_api,
        loaded.running(&node_name),
    );
    let status = Arc::new(status);
    let told = Arc::clone(&status);
    kernel.report_flows(move |forgotten| told.flows(forgotten));
    let listen = Listen {
        metrics: settings.metrics_bind_address,
        health: settings.healthz_bind_address,
        hard_fail: settings.bind_address_hard_fail,
    };
    serve::start(&status, listen)?;
    let wake = sender.clone();
    // When the channel is full, the loop is about to look anyway.
    let wake = move || drop(wake.try_send(Event::Kernel));
    let health_ports = HealthPorts::start(&status, listen, wake)?;
    let mut findings = None;
    let mut planner = Planner::new(config);
    let objects = match &settings.objects {
        Objects::Manifests(paths) => {
            let memory = place.as_ref().map(|place| place.file("manifests.json"));
            let source = Source::new(paths.clone(), &node_name, node.is_none()).remembering(memory);
            let sender = sender.clone();
            let tell = move |news| sender.send(Event::Manifests(news)).is_ok();
            manifests::follow(source, tell).context("manifests can't be followed")?;
            controller::Objects::Manifests(None)
        }
        Objects::Kubeconfig(_) | Objects::InCluster => {
            let (found, to_report) = mpsc::channel(FINDINGS);
            findings = Some(found);
            let events = (to_report, Arc::clone(&status));
            let nodes = (node_name.clone(), settings.all_nodes);
            follow(runtime, access, nodes, sender.clone(), events)?;
            controller::Objects::Api(BTreeSet::new())
        }
    };
    if let Some(node) = node {
        planner.apply(Change::Node(node));
    }
    if flags.shape.config.is_some() {
        stop_on_change(
            settings.clone(),
            flags.clone(),
            Arc::clone(&stop),
            sender.clone(),
        )?;
    }
    addresses::watch(move |notices| sender.send(Event::Addresses(notices)).is_ok())?;
    init::adjust_oom_score(settings);
    init::keep_strict_arp(settings, place.as_ref());
    let timeouts = Timeouts::open(settings.timeouts)?;
    let of_loop = controller::Settings {
        follow_addresses: settings.node_ips.is_empty(),
        stop,
        sync_period: settings.sync_period,
        strict_arp: settings.strict_arp,
        set_sysctls: sysctl::set,
        conntrack: init::conntrack(settings),
        timeouts,
        drift: settings.drift,
        drains: place.map(|place| Drains::new(&place.file("drains.json"))),
        status,
        surroundings: Surroundings::default(),
        health_ports: Some(health_ports),
        findings,
    };
    info!(
        node = node_name,
        %scheduler,
        families = families.len(),
        "started"
    );
    begun.store(true, Ordering::Relaxed);
    Controller::new(objects, planner, kernel, of_loop, Instant::now).run(&events);
    Ok(())
}

/// How long a start waits for the tools of iptables. Until they answer, what the node can serve is what it could with them.
const TOOLS_WAIT: Duration = Duration::from_secs(1);

/// Opens the kernel, with all that runs iptables on a thread of its own.
fn open(iptables: Choice, scheduler: Scheduler, sender: &SyncSender<Event>) -> Result<Kernel> {
    let mut kernel = Kernel::open_with(&Family::ALL, Tools::later(iptables))?;
    kernel.require_scheduler(scheduler)?;
    let (own, listener, wake) = (kernel.own_rules(), sender.clone(), sender.clone());
    let found = move |tools: &Tools| {
        let (Ok(backend), Ok(version)) = (tools.backend(), tools.version()) else {
            return;
        };
        info!(iptables = %backend, %version, "found the tools of iptables");
        let tell = move || listener.send(Event::Rules).is_ok();
        if backend == Backend::Nft
            && let Err(error) = notices::watch(own, &Family::ALL, tell)
        {
            error!(error = %Causes(&error), "changes of iptables rules can't be listened to; only audits find them");
        }
    };
    // When the channel is full, the loop is about to look anyway.
    let notify = move || drop(wake.try_send(Event::Kernel));
    let mut kernel = kernel
        .detach_rules(found, notify)
        .context("the thread for iptables can't be started")?;
    if !kernel.await_tools(TOOLS_WAIT)? {
        warn!("iptables does not answer; what needs a change of its rules waits, and nothing else");
    }
    Ok(kernel)
}

/// Findings that may wait to be looked at.
const FINDINGS: usize = 256;

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
/// when it waits. Before it has begun the process ends at once: whatever a start waits for (a
/// credential plugin, a slow disk) may never come.
fn stop_on_signals(sender: SyncSender<Event>, begun: Arc<AtomicBool>) -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block().context("signals can't be blocked")?;
    let wait = move || {
        if signals.wait().is_ok() {
            if !begun.load(Ordering::Relaxed) {
                info!("ended before the start was over");
                std::process::exit(0);
            }
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

/// Ends the loop when the configuration file says something else than at start, so that whatever
/// started this process starts it again. A file that can't be used changes nothing.
fn stop_on_change(
    settings: Settings,
    flags: Run,
    stop: Arc<AtomicBool>,
    sender: SyncSender<Event>,
) -> Result<()> {
    let Some(file) = flags.shape.config.clone() else {
        return Ok(());
    };
    let (ticks, changes) = sync_channel(1);
    let busy = manifests::watch(std::slice::from_ref(&file), ticks)
        .context("the configuration can't be watched")?;
    let mut told = Vec::new();
    let watch = move || {
        for () in changes {
            if busy.contains(&file) {
                continue;
            }
            let file = file.display();
            match config::load(&flags) {
                Ok(loaded) if loaded.settings == settings => {
                    if !std::mem::take(&mut told).is_empty() {
                        info!(%file, "the configuration is good again");
                        let _ = sender.send(Event::Configuration(None));
                    }
                }
                Ok(_) => {
                    info!(%file, "the configuration changed: ending, to be started again with it");
                    stop.store(true, Ordering::Relaxed);
                    // The loop may have ended already.
                    let _ = sender.send(Event::Stop);
                    return;
                }
                // A directory that is not there makes a message each second.
                Err(problems) if problems == told => {}
                Err(problems) => {
                    for problem in &problems {
                        error!("{problem}; what was said at start stays in force");
                    }
                    let _ = sender.send(Event::Configuration(Some(problems.join("; "))));
                    told = problems;
                }
            }
        }
    };
    thread::Builder::new()
        .name("configuration".to_owned())
        .spawn(watch)?;
    Ok(())
}

/// How the API server is reached, and what its client runs on. Files that can't be used at start are
/// an error; later they are a failure that may pass.
fn reach(settings: &Settings) -> Result<(Runtime, Access)> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("no runtime for the API server's client")?;
    let access = Access {
        kubeconfig: match &settings.objects {
            Objects::Kubeconfig(file) => Some(file.clone()),
            _ => None,
        },
        master: settings.master.clone(),
        // There are no metrics yet.
        ..Access::default()
    };
    if !matches!(settings.objects, Objects::Manifests(_)) {
        runtime.block_on(access.client())?;
    }
    Ok((runtime, access))
}

/// Follows the API server, and writes Events to it, on a thread of its own.
fn follow(
    runtime: Runtime,
    mut access: Access,
    (node_name, all_nodes): (String, bool),
    sender: SyncSender<Event>,
    (findings, status): (mpsc::Receiver<Finding>, Arc<Status>),
) -> Result<()> {
    access.requests = status.metrics.requests.clone();
    let follow = move || {
        let follow = api::follow(&access, &node_name, all_nodes, &sender);
        let write = events::write(&access, &node_name, findings, &status);
        runtime.block_on(futures::future::join(follow, write));
    };
    thread::Builder::new()
        .name("api".to_owned())
        .spawn(follow)?;
    Ok(())
}
