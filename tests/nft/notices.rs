//! A change of the rules by other hands is told, once for each transaction; our own is not.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use ipset_rs::{Change, Client, SetSpec};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::rules::rules;
use ipvs_proxy_core::state::Set;
use ipvs_proxy_dataplane::notices::{OwnRules, watch};
use ipvs_proxy_iptables::Ruleset;
use ipvs_proxy_netlink::{Family, Socket, Subsystem};
use tests::daemon::PATIENCE;
use tests::netns::Namespace;

use crate::tools;

struct Scene {
    node: Namespace,
    own: OwnRules,
    told: Receiver<()>,
}

impl Scene {
    /// A node with our rules and a listener.
    fn new() -> Scene {
        let node = Namespace::new();
        let own = OwnRules::default();
        let (sender, told) = channel();
        node.enter(|| {
            let sets = Family::ALL.into_iter().flat_map(Set::all);
            let create = sets.map(|set| Change::Create(SetSpec::new(set.name(), set.kind())));
            for result in Client::open().unwrap().change(&create.collect::<Vec<_>>()) {
                result.unwrap();
            }
            watch(own.clone(), &Family::ALL, move || sender.send(()).is_ok()).unwrap();
        });
        Scene { node, own, told }
    }

    /// Puts rules right as the daemon does, while others do something as well. Whether there was
    /// something to do.
    fn restore_while(&self, rules: &Ruleset, meanwhile: impl FnOnce() + Send) -> bool {
        let own = &self.own;
        self.node.enter(|| {
            let tools = tools();
            let text = rules.restore_text(&tools.present(rules).unwrap());
            let transactions = text.matches("COMMIT").count();
            let mut socket = Socket::open(Subsystem::Netfilter).unwrap();
            let write = || {
                tools.restore(rules.family, &text).unwrap();
                meanwhile();
            };
            own.during(&mut socket, transactions, write);
            !text.is_empty()
        })
    }

    fn restore(&self, rules: &Ruleset) -> bool {
        self.restore_while(rules, || {})
    }

    /// Whether a change was told. Notices come in order: when those that come in any case are
    /// there, all before them are.
    fn told(&self, expected: bool) -> bool {
        for action in ["-A", "-D"] {
            let rule = format!("iptables-nft -t nat {action} OUTPUT -j ACCEPT");
            self.node.tool(&rule);
        }
        let certain = if expected { 3 } else { 2 };
        for _ in 0..certain {
            if self.told.recv_timeout(PATIENCE).is_err() {
                assert!(expected, "a change of others is not told");
                return false;
            }
        }
        let more = || self.told.recv_timeout(Duration::from_secs(1)).is_ok();
        let others = std::iter::repeat_with(more).take_while(|more| *more);
        others.count() > 0 || expected
    }
}

#[test]
fn what_others_change_is_told_and_what_we_change_is_not() {
    let scene = Scene::new();
    let [v4, v6] = Family::ALL.map(|family| rules(&Config::default(), family));
    assert!(scene.restore(&v4) && scene.restore(&v6));
    assert!(!scene.told(false));

    for damage in [
        "iptables-nft -t nat -F KUBE-SERVICES",
        "ip6tables-nft -D INPUT 1",
        "iptables-nft -t filter -F",
        "nft flush chain ip nat POSTROUTING",
        "nft delete table ip6 nat",
        "nft flush ruleset",
    ] {
        scene.node.tool(damage);
        assert!(scene.told(true), "{damage}");
        let restored = [scene.restore(&v4), scene.restore(&v6)];
        assert!(restored.contains(&true), "{damage}");
        assert!(!scene.told(false), "the repair of {damage}");
    }

    // Rules of others, where ours are not.
    for other in [
        "nft add table ip other",
        "nft add chain ip other KUBE-SERVICES",
        "nft add rule ip other KUBE-SERVICES accept",
        "iptables-nft -t mangle -A FORWARD -j ACCEPT",
        "iptables-nft -t nat -N MINE",
        "iptables-nft -t nat -A MINE -j ACCEPT",
        "nft delete table ip other",
    ] {
        scene.node.tool(other);
        assert!(!scene.told(false), "{other}");
    }
}

#[test]
fn others_who_write_while_we_do_are_told() {
    let scene = Scene::new();
    let v4 = rules(&Config::default(), Family::V4);
    let node = &scene.node;
    assert!(scene.restore_while(&v4, || {
        node.tool("iptables-nft -t nat -F KUBE-SERVICES");
    }));
    assert!(scene.told(true));
}
