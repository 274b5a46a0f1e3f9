//! The planner's iptables rules in a kernel: written once, recognised afterwards, gone without a trace.
//! Included by the test programs of both back ends.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::rules::rules;
use ipvs_proxy_core::state::Set;
use ipvs_proxy_netlink::Family;

use crate::tools;

const FOREIGN: &str = "*filter\n:OTHER - [0:0]\n-A INPUT -j OTHER\n-A OTHER -p tcp -m tcp --dport 7 -j DROP\nCOMMIT\n";

fn configurations() -> [Config; 3] {
    let cidrs = ["10.0.0.0/16", "fd00:10::/48"].map(|net| net.parse().unwrap());
    [
        Config::default(),
        Config {
            cluster_cidrs: cidrs.to_vec(),
            ..Config::default()
        },
        Config {
            masquerade_all: true,
            random_fully: false,
            ..Config::default()
        },
    ]
}

/// The rules match sets, which must exist.
fn create_sets() {
    let mut lines = String::new();
    for set in Family::ALL.into_iter().flat_map(Set::all) {
        let options = match (set.kind().name(), set.family) {
            ("bitmap:port", _) => "range 0-65535",
            (_, Family::V4) => "family inet",
            (_, Family::V6) => "family inet6",
        };
        writeln!(
            lines,
            "create {} {} {options}",
            set.name(),
            set.kind().name()
        )
        .unwrap();
    }
    let mut child = Command::new("ipset")
        .args(["-exist", "restore"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(lines.as_bytes())
        .unwrap();
    assert!(child.wait().unwrap().success());
}

fn saved(tools: &ipvs_proxy_iptables::Tools, family: Family) -> String {
    let tables = [
        ipvs_proxy_iptables::Table::Nat,
        ipvs_proxy_iptables::Table::Filter,
    ];
    let text: String = tables
        .into_iter()
        .map(|table| tools.save(family, table).unwrap())
        .collect();
    // Counters and the time of day
    text.lines()
        .filter(|line| !line.starts_with(['#', ':']))
        .fold(String::new(), |text, line| text + line + "\n")
}

#[test]
fn are_written_once_and_removed_whole() {
    tests::netns::run(|| {
        create_sets();
        let tools = tools();
        for family in Family::ALL {
            tools.restore(family, FOREIGN).unwrap();
            let before = saved(&tools, family);
            for config in configurations() {
                let rules = rules(&config, family);
                let nothing = tools.present(&rules).unwrap();
                tools
                    .restore(family, &rules.restore_text(&nothing))
                    .unwrap();
                let present = tools.present(&rules).unwrap();
                assert_eq!(rules.differences(&present), [], "{}", saved(&tools, family));
                assert_eq!(rules.restore_text(&present), "");
                assert!(saved(&tools, family).contains("-A OTHER -p tcp -m tcp --dport 7 -j DROP"));
            }
            let rules = rules(&Config::default(), family);
            let present = tools.present(&rules).unwrap();
            tools
                .restore(family, &rules.removal_text(&present))
                .unwrap();
            assert!(tools.present(&rules).unwrap().is_empty());
            assert_eq!(saved(&tools, family), before);
        }
    });
}
