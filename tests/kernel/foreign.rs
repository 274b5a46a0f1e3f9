//! `unharmed`, beside which all of these tests run, sees what is changed.

use std::path::PathBuf;
use std::process::Command;

use tests::netns::Namespace;

fn unharmed(words: &[&str]) -> (Option<i32>, String) {
    let folder = tests::daemon::binary();
    let program: PathBuf = folder.with_file_name("unharmed");
    let mut command = Command::new(program);
    command.args(words);
    let output = Namespace::new().enter(|| command.output()).unwrap();
    (
        output.status.code(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

#[test]
fn a_change_is_told_and_fails() {
    assert_eq!(unharmed(&["true"]), (Some(0), String::new()));
    assert_eq!(unharmed(&["false"]), (Some(1), String::new()));
    for (damage, told) in [
        (
            "ipvsadm -e -t 203.0.113.200:6443 -r 10.1.0.1:6443 -m -w 8",
            "-w 8",
        ),
        ("ipset del ELSE 198.51.100.1", "ELSE 198.51.100.1"),
        ("iptables -I INPUT -j ACCEPT", "-A INPUT -j ACCEPT"),
        ("ip link add more type dummy", "more"),
        ("ip addr del fd99::201/128 dev else0", "fd99::201"),
        (
            "sysctl -q -w net.ipv4.vs.expire_nodest_conn=1",
            "expire_nodest_conn",
        ),
    ] {
        let words: Vec<&str> = damage.split(' ').collect();
        let (code, said) = unharmed(&words);
        assert!(
            code == Some(97) && said.contains(told),
            "{damage}: {code:?}, {said}"
        );
    }
}
