//! What the DaemonSet in `deploy` leaves to the daemon is enough for these tools, too.

use ipset_rs::{Change, Client, SetSpec};
use ipvs_proxy_core::plan::Config;
use ipvs_proxy_core::rules::rules;
use ipvs_proxy_core::state::Set;
use ipvs_proxy_netlink::Family;
use tests::netns::Namespace;

use crate::tools;

#[test]
fn net_admin_and_net_raw_are_enough() {
    let node = Namespace::new();
    let by = "setpriv --inh-caps=-all --bounding-set=-all,+net_admin,+net_raw --no-new-privs";
    for family in Family::ALL {
        let rules = rules(&Config::default(), family);
        let present = || node.enter(|| tools().present(&rules).unwrap());
        node.enter(|| {
            let create =
                Set::all(family).map(|set| Change::Create(SetSpec::new(set.name(), set.kind())));
            let create: Vec<_> = create.collect();
            let created = Client::open().unwrap().change(&create);
            created.into_iter().for_each(|result| result.unwrap());
        });
        let text = rules.restore_text(&present());
        assert!(text.contains("--match-set"), "{text}");
        let command = tools().command(family);
        node.tool_with_input(&format!("{by} {command}-restore --noflush --wait 5"), &text);
        let saved = node.tool(&format!("{by} {command}-save -t nat"));
        assert!(
            saved.contains("-A KUBE-SERVICES") && saved.contains("--match-set"),
            "{saved}"
        );
        assert_eq!(rules.restore_text(&present()), "");
    }
}
