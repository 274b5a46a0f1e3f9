//! Rules by iptables-nft, on a kernel that has nf_tables beside IPVS: `hack/test linux-7.2`.

use std::time::Instant;

use tests::daemon::wait_until;

use crate::audit::{Scene, held};

#[test]
fn rules_come_back_at_once_whatever_the_period_is() {
    let scene = Scene::start(&["--sync-period=1h"]);
    let node = scene.node();
    let log = scene.daemon.log();
    assert!(log.contains("iptables=nft"), "{log}");
    let before = held(node);
    assert!(before.len() > 80, "{before:#?}");
    scene.all_answer("at first");
    for damage in [
        "iptables -t nat -D PREROUTING 1",
        "ip6tables -t filter -D INPUT 1",
        "iptables -t nat -F KUBE-POSTROUTING",
        "ip6tables -t nat -F",
        "iptables -t filter -F",
    ] {
        let started = Instant::now();
        node.tool(damage);
        wait_until(&format!("all is as before {damage:?}"), || {
            held(node) == before
        });
        assert!(scene.daemon.log().contains("changed by somebody else"));
        println!("{damage}: {} ms", started.elapsed().as_millis());
        scene.all_answer(damage);
    }
}
