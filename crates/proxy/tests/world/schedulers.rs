//! Which real server a scheduler of IPVS picks, by the order in which they were added and by how many connections they have: a
//! model of net/netfilter/ipvs, for real servers of one weight. `tests/kernel/herd.rs` holds it against a kernel.

use ipvs_netlink::{RealServerKey, Scheduler};

/// A virtual server.
pub(crate) struct Model {
    scheduler: Scheduler,
    /// The list of the kernel: its head is the one that was added last. With open connections.
    list: Vec<(RealServerKey, u32)>,
    /// `rr`, `wrr`: the one that was picked last; at first the list itself.
    last: Option<RealServerKey>,
}

impl Model {
    pub(crate) fn new(scheduler: Scheduler) -> Model {
        Model {
            scheduler,
            list: Vec::new(),
            last: None,
        }
    }

    /// One that was added (`__ip_vs_update_dest`).
    pub(crate) fn add(&mut self, server: RealServerKey) {
        self.list.insert(0, (server, 0));
        // `ip_vs_wrr_dest_changed`.
        if self.scheduler == Scheduler::WeightedRoundRobin {
            self.last = None;
        }
    }

    /// The real servers from the head of the list on.
    pub(crate) fn order(&self) -> Vec<RealServerKey> {
        self.list.iter().map(|(server, _)| *server).collect()
    }

    /// The one that gets the next connection, which stays open.
    pub(crate) fn pick(&mut self) -> RealServerKey {
        let place = match self.scheduler {
            // `ip_vs_rr_schedule`, `ip_vs_wrr_schedule`: the next one of the list.
            Scheduler::RoundRobin | Scheduler::WeightedRoundRobin => {
                let last = |last| self.list.iter().position(|(server, _)| *server == last);
                let next = self.last.and_then(last).map_or(0, |place| place + 1);
                next % self.list.len()
            }
            // `ip_vs_lc_schedule` and the others: of those with the fewest, the first of the list.
            Scheduler::LeastConnection
            | Scheduler::WeightedLeastConnection
            | Scheduler::ShortestExpectedDelay
            | Scheduler::NeverQueue => {
                let fewest = self.list.iter().map(|(_, open)| *open).min().unwrap();
                let first = |(_, open): &(_, u32)| *open == fewest;
                self.list.iter().position(first).unwrap()
            }
            other => panic!("no model of {other}"),
        };
        let (server, open) = &mut self.list[place];
        *open += 1;
        self.last = Some(*server);
        *server
    }
}
