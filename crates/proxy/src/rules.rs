//! The iptables rules of a family. Their number does not depend on the Services: they match sets.
//!
//! Names and texts are kube-proxy's where the meaning is. What differs:
//!
//! - `nat`: what is not for a local address leaves at the first rule, since every VIP and node
//!   address is local. What is in [`Role::ExternalIp`] is masqueraded although it is in [`Role::ExternalIpLocal`] as well, as it
//!   is while the policy changes.
//! - `filter` INPUT: only new connections to an address on the dummy link are looked at, and they
//!   pass by [`Role::Serving`], which is filled after a virtual server is there and emptied
//!   before it goes. kube-proxy lets them pass by KUBE-CLUSTER-IP, which is filled first. Health check node ports
//!   ([`Role::HealthCheckNodePort`]) come before that, so they pass on VIPs, too, whatever the host refuses behind.
//! - `filter` FORWARD: the many packets of established connections leave first.
//! - `mangle`: packets to VIPs that are another host's address ([`Role::Routed`]) are routed to this node by a mark. They are
//!   masqueraded as those to other external addresses are, by a mark that they get here: `nat` sees no local address.
//! - Each chain has a rule that names a set, and so has each jump or one beside it, where need be one that every packet matches
//!   (`counted`): the kernel counts for each set the rules that name it, which is how the loss of rules is noticed at once.

use ipvs_proxy_iptables::{Chain, Jump, Ruleset, Table, TableRules};
use ipvs_proxy_netlink::Family;

use crate::plan::Config;
use crate::state::{Role, Set};

/// The rules of a family.
#[must_use]
pub fn rules(config: &Config, family: Family) -> Ruleset {
    Ruleset {
        family,
        tables: vec![
            mangle(config, family),
            nat(config, family),
            filter(config, family),
        ],
    }
}

/// The rules of a family in each table apart, with the table.
pub fn by_table(config: &Config, family: Family) -> impl Iterator<Item = (Table, Ruleset)> + use<> {
    let tables = rules(config, family).tables.into_iter();
    tables.map(move |rules| {
        let table = rules.table;
        let tables = vec![rules];
        (table, Ruleset { family, tables })
    })
}

fn mangle(config: &Config, family: Family) -> TableRules {
    let (routed, counted) = (matching(family, Role::Routed), counted(family));
    let masquerade = bit(config.masquerade_bit);
    let marking = |mark: u32| format!("-j MARK --set-xmark {mark:#x}/{mark:#x}");
    let masqueraded = |role| format!("{} dst,dst -j KUBE-IPVS-MASQ", matching(family, role));
    let jump = |from: &str, to: &str| Jump {
        from: from.to_owned(),
        rule: format!(
            "-m comment --comment \"kubernetes service portals on addresses of other hosts\" {routed} dst,dst -j {to}"
        ),
        first: true,
    };
    TableRules {
        table: Table::Mangle,
        chains: vec![
            chain(
                "KUBE-IPVS-ROUTE",
                vec![
                    marking(bit(config.route_bit)),
                    masqueraded(Role::ExternalIp),
                    format!(
                        "{} dst,dst -j RETURN",
                        matching(family, Role::LoadBalancerLocal)
                    ),
                    masqueraded(Role::LoadBalancer),
                ],
            ),
            // IPVS takes the node's own packets wherever they would go.
            chain(
                "KUBE-IPVS-MASQ",
                vec![format!("{counted} {}", marking(masquerade))],
            ),
        ],
        jumps: vec![
            jump("PREROUTING", "KUBE-IPVS-ROUTE"),
            jump("OUTPUT", "KUBE-IPVS-MASQ"),
        ],
    }
}

fn nat(config: &Config, family: Family) -> TableRules {
    let (mark, counted) = (mark(config), counted(family));
    let (loop_back, cluster_ip) = (
        matching(family, Role::LoopBack),
        matching(family, Role::ClusterIp),
    );
    let loopback_net = match family {
        Family::V4 => "127.0.0.0/8",
        Family::V6 => "::1/128",
    };
    let mut services = vec![
        "-m addrtype ! --dst-type LOCAL -j RETURN".to_owned(),
        format!("-s {loopback_net} -j RETURN"),
    ];
    let comment = "-m comment --comment \"Kubernetes service cluster ip + port for masquerade \
                   purpose\"";
    let networks = config
        .cluster_cidrs
        .iter()
        .filter(|net| Family::of(net.addr()) == family);
    let pods = match &config.pod_interface {
        Some(link) => Some(format!("! -i {link}")),
        None => networks.map(|net| format!("! -s {}", net.trunc())).next(),
    };
    services.push(match pods {
        _ if config.masquerade_all => {
            format!("{comment} {cluster_ip} dst,dst -j KUBE-MARK-MASQ")
        }
        Some(not_pods) => format!("{not_pods} {comment} {cluster_ip} dst,dst -j KUBE-MARK-MASQ"),
        // Only the node itself, which takes the VIP as its source when it goes to a VIP.
        None => format!("{comment} {cluster_ip} src,dst -j KUBE-MARK-MASQ"),
    });
    // Who comes in by these addresses is masqueraded wherever it comes from, but for clients that keep their address.
    for (role, comment, to) in [
        (
            Role::LoadBalancer,
            "Kubernetes service lb portal",
            "KUBE-LOAD-BALANCER",
        ),
        (
            Role::ExternalIp,
            "Kubernetes service external ip + port for masquerade and filter purpose",
            "KUBE-MARK-MASQ",
        ),
    ] {
        let set = matching(family, role);
        services.push(format!(
            "-m comment --comment \"{comment}\" {set} dst,dst -j {to}"
        ));
    }
    // A VIP is a local address: keep the port maps of container networks away from it.
    for role in [
        Role::ClusterIp,
        Role::LoadBalancer,
        Role::ExternalIp,
        Role::ExternalIpLocal,
    ] {
        services.push(format!("{} dst,dst -j ACCEPT", matching(family, role)));
    }
    // After them: a port of a VIP may be a node port as well, and is not to be masqueraded for that.
    services.push("-j KUBE-NODE-PORT".to_owned());

    let node_port = |protocol: &str, local, all, flags: &str, name: &str| {
        let rule = |which: &str, role, to: &str| {
            format!(
                "-p {protocol} -m comment --comment \"Kubernetes nodeport {name} port {which}for \
                 masquerade purpose\" {} {flags} -j {to}",
                matching(family, role)
            )
        };
        [
            rule("with externalTrafficPolicy=local ", local, "RETURN"),
            rule("", all, "KUBE-MARK-MASQ"),
        ]
    };
    let node_ports = [
        node_port(
            "tcp",
            Role::NodePortLocalTcp,
            Role::NodePortTcp,
            "dst",
            "TCP",
        ),
        node_port(
            "udp",
            Role::NodePortLocalUdp,
            Role::NodePortUdp,
            "dst",
            "UDP",
        ),
        node_port(
            "sctp",
            Role::NodePortLocalSctp,
            Role::NodePortSctp,
            "dst,dst",
            "SCTP",
        ),
    ];
    let jump = |from: &str, comment: &str, to: &str| Jump {
        from: from.to_owned(),
        rule: format!("-m comment --comment \"{comment}\" {counted} -j {to}"),
        first: true,
    };
    let random = if config.random_fully {
        " --random-fully"
    } else {
        ""
    };
    TableRules {
        table: Table::Nat,
        chains: vec![
            chain("KUBE-SERVICES", services),
            chain(
                "KUBE-LOAD-BALANCER",
                vec![
                    format!(
                        "-m comment --comment \"Kubernetes service load balancer ip + port with \
                         externalTrafficPolicy=local\" {} dst,dst -j RETURN",
                        matching(family, Role::LoadBalancerLocal)
                    ),
                    "-j KUBE-MARK-MASQ".to_owned(),
                ],
            ),
            chain("KUBE-NODE-PORT", node_ports.concat()),
            chain(
                "KUBE-MARK-MASQ",
                vec![format!("{counted} -j MARK --set-xmark {mark}/{mark}")],
            ),
            chain(
                "KUBE-POSTROUTING",
                vec![
                    format!(
                        "-m comment --comment \"Kubernetes endpoints dst ip:port, source ip for \
                         solving hairpin purpose\" {loop_back} dst,dst,src -j MASQUERADE"
                    ),
                    format!("-m mark ! --mark {mark}/{mark} -j RETURN"),
                    format!("-j MARK --set-xmark {mark}/0x0"),
                    format!(
                        "-m comment --comment \"kubernetes service traffic requiring SNAT\" \
                         -j MASQUERADE{random}"
                    ),
                ],
            ),
        ],
        jumps: vec![
            jump("PREROUTING", "kubernetes service portals", "KUBE-SERVICES"),
            jump("OUTPUT", "kubernetes service portals", "KUBE-SERVICES"),
            jump(
                "POSTROUTING",
                "kubernetes postrouting rules",
                "KUBE-POSTROUTING",
            ),
        ],
    }
}

fn filter(config: &Config, family: Family) -> TableRules {
    let (mark, counted) = (mark(config), counted(family));
    let reject = match family {
        Family::V4 => "icmp-port-unreachable",
        Family::V6 => "icmp6-port-unreachable",
    };
    let (vips, serving) = (
        matching(family, Role::IpvsIps),
        matching(family, Role::Serving),
    );
    let health = matching(family, Role::HealthCheckNodePort);
    TableRules {
        table: Table::Filter,
        chains: vec![
            // Of any state: who refuses by default may have no rule for established connections.
            chain(
                "KUBE-NODE-PORT",
                vec![format!(
                    "-m comment --comment \"Kubernetes health check node port\" {health} dst -j ACCEPT"
                )],
            ),
            chain(
                "KUBE-IPVS-FILTER",
                vec![
                    format!("{serving} dst,dst -j RETURN"),
                    // TCP ignores an ICMP error while connect() holds the socket, as it does when
                    // client and node are one machine: it would be refused after 1 s only.
                    "-p tcp -j REJECT --reject-with tcp-reset".to_owned(),
                    format!("-j REJECT --reject-with {reject}"),
                ],
            ),
            chain(
                "KUBE-FORWARD",
                vec![
                    "-m comment --comment \"kubernetes forwarding conntrack rule\" -m conntrack \
                     --ctstate RELATED,ESTABLISHED -j ACCEPT"
                        .to_owned(),
                    format!(
                        "-m comment --comment \"kubernetes forwarding rules\" -m mark --mark \
                         {mark}/{mark} {counted} -j ACCEPT"
                    ),
                ],
            ),
        ],
        jumps: vec![
            // Before the next: load balancers ask on a VIP, too.
            Jump {
                from: "INPUT".to_owned(),
                rule: format!(
                    "-p tcp -m comment --comment \"kubernetes health check rules\" {health} dst -j KUBE-NODE-PORT"
                ),
                first: true,
            },
            Jump {
                from: "INPUT".to_owned(),
                rule: format!(
                    "-m comment --comment \"kubernetes ipvs access filter\" -m conntrack \
                     --ctstate NEW {vips} dst -j KUBE-IPVS-FILTER"
                ),
                first: true,
            },
            // It only accepts, and those who refuse what is forwarded (network policies) must come first.
            Jump {
                from: "FORWARD".to_owned(),
                rule: "-m comment --comment \"kubernetes forwarding rules\" -j KUBE-FORWARD"
                    .to_owned(),
                first: false,
            },
            // What it matches was accepted by then: it is there to be counted, and costs nothing to what is established.
            Jump {
                from: "FORWARD".to_owned(),
                rule: format!("-m mark --mark {mark}/{mark} {counted} -j KUBE-FORWARD"),
                first: false,
            },
        ],
    }
}

/// The mark that asks for masquerading, in iptables' own form.
fn mark(config: &Config) -> String {
    format!("{:#x}", bit(config.masquerade_bit))
}

/// A mark of this bit alone.
pub(crate) fn bit(number: u8) -> u32 {
    1_u32.checked_shl(number.into()).unwrap_or(0)
}

fn matching(family: Family, role: Role) -> String {
    format!("-m set --match-set {}", Set { family, role }.name())
}

fn chain(name: &str, rules: Vec<String>) -> Chain {
    Chain {
        name: name.to_owned(),
        rules,
    }
}

/// A match of every packet, which names a set: no packet goes to a mark.
fn counted(family: Family) -> String {
    let marks = Set {
        family,
        role: Role::Marks,
    };
    format!("-m set ! --match-set {} dst", marks.name())
}
