//! The planner's iptables rules in a kernel: written once, recognised afterwards, gone without a trace.
//! Included by the test programs of both back ends.

use ipset_rs::{Change, Client, SetSpec};
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
    let sets = Family::ALL.into_iter().flat_map(Set::all);
    let create = sets.map(|set| Change::Create(SetSpec::new(set.name(), set.kind())));
    for result in Client::open().unwrap().change(&create.collect::<Vec<_>>()) {
        result.unwrap();
    }
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
