//! Native rules of nftables in a table of iptables hide that table, and no other.

use ipset_rs::{Change, Client, SetSpec};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::rules::by_table;
use ipvs_proxy_core::state::Set;
use ipvs_proxy_iptables::{Error, Table};
use ipvs_proxy_netlink::Family;
use tests::netns::Namespace;

use crate::tools;

#[test]
fn a_table_with_native_rules_is_told_apart() {
    let node = Namespace::new();
    let tables = || by_table(&Config::default(), Family::V4);
    // The others are written all the same.
    let hidden = |table: Table| {
        let (_, rules) = tables().find(|(of, _)| *of == table).unwrap();
        let tools = node.enter(tools);
        node.enter(|| match tools.present(&rules) {
            Ok(present) => {
                let text = rules.restore_text(&present);
                tools.restore(Family::V4, &text).unwrap();
                false
            }
            Err(Error::Incompatible { .. }) => true,
            Err(error) => panic!("{error}"),
        })
    };
    node.enter(|| {
        let create =
            Set::all(Family::V4).map(|set| Change::Create(SetSpec::new(set.name(), set.kind())));
        let created = Client::open().unwrap().change(&create.collect::<Vec<_>>());
        created.into_iter().for_each(|result| result.unwrap());
    });
    for table in ["filter", "nat"] {
        node.tool(&format!("nft add table ip {table}"));
        node.tool(&format!("nft add chain ip {table} NATIVE"));
        node.tool(&format!(
            "nft add rule ip {table} NATIVE ip ttl 1-5 meta mark set numgen random mod 3"
        ));
        let found = [Table::Filter, Table::Nat].map(hidden);
        assert_eq!(found, [table == "filter", table == "nat"]);
        node.tool(&format!("nft delete table ip {table}"));
    }
    assert_eq!([Table::Filter, Table::Nat].map(hidden), [false, false]);
}
