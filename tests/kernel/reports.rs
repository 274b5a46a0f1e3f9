//! Public bug reports around IPVS service proxies on a real kernel, each test named after its id; those that a kernel in memory can
//! tell are in `crates/proxy/tests/reports.rs`. Where another test of the kernel tells it already:
//!
//! | report | where |
//! |---|---|
//! | A03, A08 (drains) | `traffic::drain::a_removed_endpoint_keeps_its_connections_until_they_end` |
//! | A04 | `kinds::udp::a_client_that_never_stops_goes_on_with_another_endpoint` |
//! | A06, A07 | `kinds::drains` |
//! | D05 (a scheduler that is not there) | `bad_input::a_scheduler_that_the_kernel_has_not` |
//! | E01 (a restart under load) | `traffic::restart` |
//! | E02, E06 (foreign things, cleanup) | `cleanup` |
//! | E05 | `audit::what_others_change_comes_back` |
//! | F06 (an endpoint among a thousand Services) | `events` |
//! | I01 | `traffic::host` |
//! | I02 | `traffic::paths::without_endpoints_a_service_refuses_at_once` |
//! | I05, I10 | `traffic::paths` |
//! | I06, I07 | `kinds::addresses` |
//!
//! What waits: C04 with externalTrafficPolicy Local, D04, H01 and H04 for traffic policies; E08
//! for a first release to come from; J05 for a guest without IPv6.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use tests::daemon::{Daemon, Manifests, service, wait_until};
use tests::foreign;
use tests::netns::Namespace;
use tests::tap::Tap;
use tests::topology::{NODE, Topology};
use tests::traffic::{Server, http_get};

use crate::scene::{self, CLUSTER_CIDR, NODE_PORT, PORT, Stop, TARGET, ready};

mod servers;
mod sets;
mod sockets;
mod start;

const WEB: [&str; 2] = ["10.96.0.20", "fd96::20"];

/// A node beside things of other software, with pods that all serve, and a daemon.
struct Scene {
    // First, so that it is gone before what it works on.
    daemon: Option<Daemon>,
    topology: Topology,
    manifests: Manifests,
    _servers: Vec<Server>,
    foreign: String,
}

impl Scene {
    fn new(pods: u8) -> Scene {
        let topology = Topology::new(pods);
        foreign::make(topology.node());
        Scene {
            daemon: None,
            _servers: (0..pods).map(|pod| topology.serve(pod, TARGET)).collect(),
            foreign: foreign::said(topology.node()),
            topology,
            manifests: Manifests::new(),
        }
    }

    /// With the Service `web` at rest: these pods as endpoints, more lines below its `spec`.
    fn web(pods: u8, endpoints: &[u8], more: &str, flags: &[&str]) -> Scene {
        let mut this = Scene::new(pods);
        this.manifests.write("web.yaml", &web(more));
        this.endpoints(endpoints);
        this.launch(flags);
        this.settle();
        this
    }

    fn launch(&mut self, flags: &[&str]) {
        self.launch_by(&[], flags);
    }

    fn launch_by(&mut self, by: &[&str], flags: &[&str]) {
        self.daemon = None;
        let node_ips = format!("--node-ips={},{}", NODE[0], NODE[1]);
        let mut all = vec![node_ips.as_str(), CLUSTER_CIDR];
        all.extend(flags);
        self.daemon = Some(Daemon::start_by(
            self.topology.node(),
            &self.manifests,
            by,
            &all,
        ));
    }

    fn settle(&mut self) {
        self.daemon.as_mut().unwrap().settle();
    }

    fn log(&self) -> String {
        self.daemon.as_ref().unwrap().log()
    }

    fn node(&self) -> &Namespace {
        self.topology.node()
    }

    fn endpoints(&self, pods: &[u8]) {
        self.manifests
            .write("slices.yaml", &slices("web", TARGET, &ready(pods)));
    }

    fn answers(&self, to: &str) -> String {
        let to: SocketAddr = to.parse().unwrap();
        let answer = self.topology.outside().enter(|| http_get(to));
        answer.unwrap_or_else(|error| panic!("{to}: {error}")).name
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(foreign::said(self.topology.node()), self.foreign);
        }
    }
}

fn web(more: &str) -> String {
    service("web", &WEB, &[("", "TCP", PORT, NODE_PORT)]) + more
}

/// A slice for each family, with pods that are ready or not.
fn slices(of: &str, target: u16, endpoints: &[(u8, bool)]) -> String {
    scene::slices(of, &[("", "TCP", target)], endpoints)
}

fn writes(tap: &Tap) -> Vec<String> {
    let asked = tap.take().into_iter();
    asked
        .filter(|asked| asked.writes)
        .map(|asked| asked.text)
        .collect()
}

/// Waits until all of these were written, in any order; all that was.
fn await_writes(tap: &Tap, wanted: &[String]) -> Vec<String> {
    let mut all = Vec::new();
    let wanted: BTreeSet<&String> = wanted.iter().collect();
    wait_until(&format!("{wanted:?} is written"), || {
        all.extend(writes(tap));
        wanted.iter().all(|text| all.contains(text))
    });
    all
}

/// Waits until the kernel was read that often from its beginning; what was written meanwhile.
fn audits(tap: &Tap, times: usize) -> Vec<String> {
    let (mut written, mut seen) = (Vec::new(), 0);
    wait_until(&format!("{times} audits"), || {
        for asked in tap.take() {
            seen += usize::from(asked.text == "ipvs GET_SERVICE");
            written.extend(asked.writes.then_some(asked.text));
        }
        seen > times
    });
    written
}
