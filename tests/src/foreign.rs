//! Things of other software in a network namespace, in each place where the daemon has its own, and what the tools say of them.

use std::fmt::Write;

use crate::netns::Namespace;

/// The virtual servers of other software: by address, on the node's own address, and by mark.
const SERVERS: &str = "\
-A -t 203.0.113.200:6443 -s wrr -p 60
-a -t 203.0.113.200:6443 -r 10.1.0.1:6443 -m -w 7
-a -t 203.0.113.200:6443 -r 10.1.0.2:6443 -g -w 0
-A -u 192.168.10.11:5353 -s lc
-a -u 192.168.10.11:5353 -r 10.1.0.3:53 -m -w 1
-A -t [fd99::200]:6443 -s sh
-a -t [fd99::200]:6443 -r [fd00:1::4]:6443 -m -w 2
-A -f 7 -s rr
-a -f 7 -r 10.1.0.4:0 -m -w 2
-A -f 8 -6 -s rr
-a -f 8 -6 -r [fd00:1::4]:0 -m -w 2
";
const SETS: &str = "\
create ELSE hash:ip
add ELSE 198.51.100.1
create ELSE-6 hash:ip,port family inet6
add ELSE-6 fd99::1,tcp:80
create ELSE-LIST list:set
add ELSE-LIST ELSE
";
const RULES: &str = "\
*mangle
:ELSE-MANGLE - [0:0]
-A ELSE-MANGLE -p tcp -m tcp --dport 9997 -j MARK --set-xmark 0x1/0xf
-A PREROUTING -j ELSE-MANGLE
-A OUTPUT -j ELSE-MANGLE
COMMIT
*nat
:ELSE-NAT - [0:0]
-A ELSE-NAT -p tcp -m tcp --dport 9999 -j REDIRECT --to-ports 99
-A PREROUTING -j ELSE-NAT
COMMIT
*filter
:ELSE-FILTER - [0:0]
-A ELSE-FILTER -p tcp -m tcp --dport 9998 -j DROP
-A INPUT -j ELSE-FILTER
-A FORWARD -j ELSE-FILTER
COMMIT
";
const LINKS: &str = "\
link add else0 type dummy
link set else0 addrgenmode none
link set else0 up
addr add 203.0.113.201/32 dev else0
addr add fd99::201/128 dev else0 nodad
";
/// The words by which a line is known to be about them.
const MARKS: [&str; 9] = [
    "ELSE",
    "else0",
    "203.0.113.200:",
    "192.168.10.11:5353",
    "[fd99::200]:",
    "-f 7 ",
    "-f 8 ",
    "203.0.113.201",
    "fd99::201",
];

/// Makes them.
pub fn make(namespace: &Namespace) {
    namespace.tool_with_input("ip -batch -", LINKS);
    make_servers(namespace);
    namespace.tool_with_input("ipset restore", SETS);
    namespace.tool_with_input("iptables-restore --noflush", RULES);
    namespace.tool_with_input("ip6tables-restore --noflush", RULES);
}

/// Makes the virtual servers alone, for instance again.
pub fn make_servers(namespace: &Namespace) {
    namespace.tool_with_input("ipvsadm --restore", SERVERS);
}

/// What the tools say of all there is, without counters, times and the order of a hash table.
pub fn all(namespace: &Namespace) -> String {
    let mut text = String::new();
    for tool in [
        "ipvsadm -Sn",
        "ipset save",
        "iptables-save",
        "ip6tables-save",
        "ip -d -o link",
        "ip -o address",
        "ip rule",
        "ip -6 rule",
    ] {
        let said = namespace.tool(tool);
        let mut lines: Vec<String> = said.lines().filter_map(|line| kept(tool, line)).collect();
        if tool.starts_with("ipvsadm") {
            lines.sort_unstable();
        }
        let _ = writeln!(text, "$ {tool}\n{}", lines.join("\n"));
    }
    text
}

/// As [`all`], of them alone.
pub fn said(namespace: &Namespace) -> String {
    let text = all(namespace);
    let of_them = |line: &&str| MARKS.iter().any(|mark| line.contains(mark));
    let lines: Vec<&str> = text.lines().filter(of_them).collect();
    lines.join("\n")
}

fn kept(tool: &str, line: &str) -> Option<String> {
    let counters = line.starts_with(':').then(|| line.split(" [").next());
    let line = counters.flatten().unwrap_or(line);
    let line = match tool {
        // Times go on.
        "ip -o address" => line.split(" valid_lft").next().unwrap_or(line),
        _ => line,
    };
    (!line.starts_with('#')).then(|| line.trim_end().to_owned())
}
