//! Rules written by `iptables-restore` of each back end that works here, read back as written.

use ipvs_proxy_iptables::{
    Backend, Chain, Choice, Error, Jump, Present, Ruleset, Table, TableRules, Tools,
};
use ipvs_proxy_netlink::Family;
use tests::netns::Namespace;

/// The tools of each back end that this kernel takes rules from, at least one.
fn working(node: &Namespace) -> Vec<Tools> {
    let probe = "*filter\n:PROBE - [0:0]\n-X PROBE\nCOMMIT\n";
    let tools: Vec<Tools> = [Choice::Nft, Choice::Legacy]
        .into_iter()
        .map(|choice| Tools::find(choice).expect("both back ends are installed"))
        .filter(|tools| {
            node.enter(|| {
                Family::ALL
                    .iter()
                    .all(|family| tools.restore(*family, probe).is_ok())
            })
        })
        .collect();
    assert!(!tools.is_empty(), "no back end works in this kernel");
    tools
}

fn chain(name: &str, rules: &[&str]) -> Chain {
    Chain {
        name: name.into(),
        rules: rules.iter().map(|rule| (*rule).to_owned()).collect(),
    }
}

fn jump(from: &str, rule: &str) -> Jump {
    Jump {
        from: from.into(),
        rule: rule.into(),
        first: true,
    }
}

/// The kinds of rule that a proxy needs, in the form of `iptables-save`.
fn rules(family: Family) -> Ruleset {
    let (prefix, loopback, pods, reject) = match family {
        Family::V4 => (
            "KUBE",
            "127.0.0.0/8",
            "10.244.0.0/16",
            "icmp-port-unreachable",
        ),
        Family::V6 => ("KUBE-6", "::1/128", "fd44::/32", "icmp6-port-unreachable"),
    };
    let filter = TableRules {
        table: Table::Filter,
        chains: vec![
            chain(
                "KUBE-FORWARD",
                &[
                    "-m comment --comment \"kubernetes forwarding rules\" -m mark --mark 0x4000/0x4000 -j ACCEPT",
                    "-m comment --comment \"kubernetes forwarding conntrack rule\" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
                ],
            ),
            chain(
                "KUBE-IPVS-FILTER",
                &[
                    &format!("-m set --match-set {prefix}-CLUSTER-IP dst,dst -j RETURN"),
                    &format!(
                        "-m conntrack --ctstate NEW -m set --match-set {prefix}-IPVS-IPS dst -j REJECT --reject-with {reject}"
                    ),
                ],
            ),
            chain("KUBE-SOURCE-RANGES-FIREWALL", &["-j DROP"]),
        ],
        jumps: vec![
            jump(
                "INPUT",
                "-m comment --comment \"kubernetes ipvs access filter\" -j KUBE-IPVS-FILTER",
            ),
            jump(
                "INPUT",
                "-m conntrack --ctstate NEW -j KUBE-SOURCE-RANGES-FIREWALL",
            ),
            jump(
                "FORWARD",
                "-m comment --comment \"kubernetes forwarding rules\" -j KUBE-FORWARD",
            ),
        ],
    };
    let nat = TableRules {
        table: Table::Nat,
        chains: vec![
            chain("KUBE-MARK-MASQ", &["-j MARK --set-xmark 0x4000/0x4000"]),
            chain("KUBE-NODE-PORT", &[]),
            chain(
                "KUBE-POSTROUTING",
                &[
                    &format!(
                        "-m comment --comment \"Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose\" -m set --match-set {prefix}-LOOP-BACK dst,dst,src -j MASQUERADE"
                    ),
                    "-m mark ! --mark 0x4000/0x4000 -j RETURN",
                    "-j MARK --set-xmark 0x4000/0x0",
                    "-m comment --comment \"kubernetes service traffic requiring SNAT\" -j MASQUERADE --random-fully",
                ],
            ),
            chain(
                "KUBE-SERVICES",
                &[
                    &format!("-s {loopback} -j RETURN"),
                    &format!(
                        "! -s {pods} -m comment --comment \"Kubernetes service cluster ip + port for masquerade purpose\" -m set --match-set {prefix}-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ"
                    ),
                    "-m addrtype --dst-type LOCAL -j KUBE-NODE-PORT",
                    &format!("-m set --match-set {prefix}-CLUSTER-IP dst,dst -j ACCEPT"),
                ],
            ),
        ],
        jumps: vec![
            jump(
                "PREROUTING",
                "-m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES",
            ),
            jump(
                "OUTPUT",
                "-m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES",
            ),
            jump(
                "POSTROUTING",
                "-m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING",
            ),
        ],
    };
    Ruleset {
        family,
        tables: vec![filter, nat],
    }
}

fn make_sets(node: &Namespace) {
    let mut input = String::new();
    for (prefix, family) in [("KUBE", "inet"), ("KUBE-6", "inet6")] {
        input += &format!("create {prefix}-CLUSTER-IP hash:ip,port family {family}\n");
        input += &format!("create {prefix}-LOOP-BACK hash:ip,port,ip family {family}\n");
        input += &format!("create {prefix}-IPVS-IPS hash:ip family {family}\n");
    }
    node.tool_with_input("ipset restore", &input);
}

#[test]
fn rules_are_read_back_as_written() {
    let node = Namespace::new();
    make_sets(&node);
    for tools in working(&node) {
        for family in Family::ALL {
            let rules = rules(family);
            node.enter(|| {
                let before = tools.present(&rules).expect("the tables");
                assert!(before.is_empty());
                tools
                    .restore(family, &rules.restore_text(&before))
                    .expect("rules written");
                let after = tools.present(&rules).expect("the tables");
                assert_eq!(
                    rules.differences(&after),
                    [],
                    "{} {family:?}",
                    tools.backend().unwrap()
                );
                assert_eq!(rules.restore_text(&after), "");
            });
            node.enter(|| {
                let present = tools.present(&rules).expect("the tables");
                tools
                    .restore(family, &rules.removal_text(&present))
                    .expect("rules removed");
                assert!(tools.present(&rules).expect("the tables").is_empty());
            });
        }
    }
}

#[test]
fn foreign_rules_stay_and_old_jumps_go() {
    let node = Namespace::new();
    make_sets(&node);
    let foreign = "\
*nat
:CNI - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SERVICES - [0:0]
-A CNI -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -m comment --comment older -j RETURN
-A OUTPUT -d 192.0.2.1/32 -j ACCEPT
-A OUTPUT -m comment --comment \"older -j form\" -j KUBE-SERVICES
-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A OUTPUT -m comment --comment \"-j KUBE-SERVICES\" -j CNI
COMMIT
";
    for tools in working(&node) {
        let rules = rules(Family::V4);
        node.enter(|| {
            tools.restore(Family::V4, foreign).expect("foreign rules written");
            let present = tools.present(&rules).expect("the tables");
            tools.restore(Family::V4, &rules.restore_text(&present)).expect("rules written");
            let present = tools.present(&rules).expect("the tables");
            assert_eq!(rules.differences(&present), []);
            let nat = tools.save(Family::V4, Table::Nat).expect("the table");
            let lines = |start: &str| -> Vec<String> {
                nat.lines().filter(|line| line.starts_with(start)).map(str::to_owned).collect()
            };
            assert_eq!(
                lines("-A OUTPUT"),
                [
                    "-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES",
                    "-A OUTPUT -d 192.0.2.1/32 -j ACCEPT",
                    "-A OUTPUT -m comment --comment \"-j KUBE-SERVICES\" -j CNI",
                ]
            );
            assert_eq!(lines("-A CNI"), ["-A CNI -j KUBE-MARK-MASQ"]);
            assert_eq!(
                lines("-A KUBE-MARK-MASQ"),
                ["-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000"]
            );

            // CNI goes to KUBE-MARK-MASQ, so that stays, empty.
            tools.restore(Family::V4, &rules.removal_text(&present)).expect("rules removed");
            let nat = tools.save(Family::V4, Table::Nat).expect("the table");
            let ours: Vec<&str> = nat.lines().filter(|line| line.contains("KUBE-")).collect();
            assert_eq!(
                ours,
                [
                    ":KUBE-MARK-MASQ - [0:0]",
                    "-A OUTPUT -m comment --comment \"-j KUBE-SERVICES\" -j CNI",
                    "-A CNI -j KUBE-MARK-MASQ",
                ]
            );
        });
    }
}

#[test]
fn refusals_name_the_rule() {
    let node = Namespace::new();
    let rules = Ruleset {
        family: Family::V4,
        tables: vec![TableRules {
            table: Table::Filter,
            chains: vec![chain(
                "KUBE-A",
                &["-j RETURN", "-m set --match-set ABSENT dst -j DROP"],
            )],
            jumps: vec![],
        }],
    };
    for tools in working(&node) {
        let text = rules.restore_text(&Present::default());
        let refusal = node
            .enter(|| tools.restore(Family::V4, &text))
            .expect_err("no such set");
        let Error::Failed { message, input, .. } = &refusal else {
            panic!("{refusal}")
        };
        assert!(message.contains("Set ABSENT doesn't exist"), "{refusal}");
        let blamed = "-A KUBE-A -m set --match-set ABSENT dst -j DROP";
        assert_eq!(input.as_deref(), Some(blamed));
        // The table changes as a whole or not at all.
        assert!(
            node.enter(|| tools.present(&rules))
                .expect("the table")
                .is_empty()
        );
    }
}

#[test]
fn the_back_end_in_use_is_found() {
    for tools in working(&Namespace::new()) {
        let hint = "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n";
        let rule = "*filter\n-A INPUT -s 192.0.2.1/32 -j DROP\nCOMMIT\n";
        for used in [hint, rule] {
            let node = Namespace::new();
            node.enter(|| {
                tools
                    .restore(Family::V6, &used.replace("192.0.2.1/32", "fd00::1/128"))
                    .expect("used");
                assert_eq!(
                    Tools::find(Choice::Auto).expect("tools").backend().unwrap(),
                    tools.backend().unwrap()
                );
            });
        }
    }
    // On an untouched host, one that works.
    let node = Namespace::new();
    let found = node.enter(|| Tools::find(Choice::Auto)).expect("tools");
    let mut working = working(&node).into_iter();
    assert!(working.any(|tools| tools.backend().unwrap() == found.backend().unwrap()));
    assert!(found.version().unwrap().has_random_fully());
    assert!(matches!(
        found.backend().unwrap(),
        Backend::Nft | Backend::Legacy
    ));
}
