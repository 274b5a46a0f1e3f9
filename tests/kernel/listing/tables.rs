//! Tables and names by chance.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tests::topology::{NODE, OUTSIDE, pod_addresses};

use super::Random;

const SCHEDULERS: [&str; 13] = [
    "rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "mh", "sed", "nq", "fo", "ovf",
];
const PORTS: [u16; 10] = [1, 22, 53, 80, 443, 5060, 8080, 8081, 30000, 65535];

/// Commands that make a table, in which nothing refuses to be restored.
pub(super) fn table(random: &mut Random) -> String {
    let mut lines = String::new();
    for _ in 0..random.within(1..=40) {
        let (service, v6, persistent) = service(random);
        lines += &format!(
            "-A {service}{}\n",
            settings(random, &service, v6, persistent)
        );
        for _ in 0..random.within(0..=6) {
            lines += &real_server(random, &service, v6);
        }
    }
    lines
}

fn service(random: &mut Random) -> (String, bool, bool) {
    let v6 = random.once_in(3);
    if random.once_in(5) {
        let most = if random.once_in(2) { 9 } else { 0x7fff_ffff };
        let mark = random.within(1..=most);
        let family = if v6 { " -6" } else { "" };
        return (format!("-f {mark}{family}"), v6, random.once_in(2));
    }
    let option = *random.one(&["-t", "-u", "--sctp-service"]).unwrap();
    let port = port(random);
    // All ports, which needs persistence
    let port = if random.once_in(12) { 0 } else { port };
    let at = SocketAddr::new(address(random, v6), port);
    (format!("{option} {at}"), v6, port == 0 || random.once_in(3))
}

fn port(random: &mut Random) -> u16 {
    match random.within(0..=1) {
        0 => *random.one(&PORTS).unwrap(),
        _ => u16::try_from(random.within(1..=65535)).unwrap(),
    }
}

/// Of few networks, so that names and neighbours come up, or from anywhere.
fn address(random: &mut Random, v6: bool) -> IpAddr {
    let low = random.within(1..=20);
    let any = random.next();
    match (v6, random.once_in(3)) {
        (false, false) => Ipv4Addr::from_bits(0x0a60_0000 | u32::try_from(low).unwrap()).into(),
        // What is no unicast address the kernel refuses as a real server, and then both list the same.
        (false, true) => Ipv4Addr::from_bits((any >> 32) as u32).into(),
        (true, false) => Ipv6Addr::from_bits(0xfd96 << 112 | u128::from(low)).into(),
        (true, true) => {
            Ipv6Addr::from_bits(u128::from(any) << 64 | u128::from(random.next())).into()
        }
    }
}

fn settings(random: &mut Random, service: &str, v6: bool, persistent: bool) -> String {
    let scheduler = *random.one(&SCHEDULERS).unwrap();
    let mut settings = format!(" -s {scheduler}");
    if persistent {
        let timeout = random.within(1..=100_000);
        let _ = write!(settings, " -p {timeout}");
        if random.once_in(2) {
            let mask = match (v6, random.once_in(4)) {
                (true, _) => random.within(1..=128).to_string(),
                (false, true) => Ipv4Addr::from_bits(random.next() as u32).to_string(),
                (false, false) => {
                    let host_bits = u32::try_from(random.within(0..=31)).unwrap();
                    Ipv4Addr::from_bits(u32::MAX << host_bits).to_string()
                }
            };
            let _ = write!(settings, " -M {mask}");
        }
    }
    let udp = service.starts_with("-u");
    if udp && persistent && random.once_in(4) {
        settings += " --pe sip";
    }
    if udp && random.once_in(4) {
        settings += " -o";
    }
    if random.once_in(2) {
        let names: &[&str] = match scheduler {
            "sh" => &[
                "sh-fallback",
                "sh-port",
                "sh-fallback,sh-port",
                "sh-port,flag-3",
            ],
            "mh" => &[
                "mh-fallback",
                "mh-port",
                "mh-port,mh-fallback",
                "flag-3,mh-fallback",
            ],
            _ => &[
                "flag-1",
                "flag-2",
                "flag-3",
                "flag-1,flag-3",
                "flag-3,flag-2,flag-1",
            ],
        };
        let _ = write!(settings, " -b {}", random.one(names).unwrap());
    }
    settings
}

fn real_server(random: &mut Random, service: &str, v6: bool) -> String {
    let method = *random.one(&["-m", "-m", "-g", "-i"]).unwrap();
    // The other family is for tunnels only.
    let other = method == "-i" && random.once_in(4);
    let at = SocketAddr::new(address(random, v6 != other), port(random));
    let mut line = format!("-a {service} -r {at} {method}");
    let weight = match random.within(0..=5) {
        0 => 0,
        1 => random.within(0..=0x7fff_ffff),
        _ => random.within(1..=100),
    };
    let _ = write!(line, " -w {weight}");
    if random.once_in(3) {
        let upper = random.within(0..=100_000);
        let _ = write!(line, " -x {upper} -y {}", random.within(0..=upper));
    }
    if method == "-i" {
        let port = random.within(1..=65535);
        line += &match random.within(0..=6) {
            0 => String::new(),
            1 => " --tun-type ipip".to_owned(),
            2 => " --tun-type gre --tun-nocsum".to_owned(),
            3 => " --tun-type gre --tun-csum".to_owned(),
            4 => format!(" --tun-type gue --tun-port {port} --tun-nocsum"),
            5 => format!(" --tun-type gue --tun-port {port} --tun-csum"),
            _ => format!(" --tun-type gue --tun-port {port} --tun-remcsum"),
        };
    }
    line + "\n"
}

/// Names of some of the addresses, short and far too long ones.
pub(super) fn hosts(random: &mut Random) -> String {
    let mut lines = String::from("127.0.0.1 localhost\n0.0.0.9 mark\n");
    let [pod, pod6] = pod_addresses(0);
    let fixed = [pod, pod6, OUTSIDE[0], OUTSIDE[1], NODE[0]];
    let near = (1..=20).flat_map(|low: u16| {
        let low = u32::from(low);
        [
            IpAddr::from(Ipv4Addr::from_bits(0x0a60_0000 | low)),
            Ipv6Addr::from_bits(0xfd96 << 112 | u128::from(low)).into(),
        ]
    });
    for address in fixed.into_iter().chain(near) {
        if random.once_in(2) {
            let labels =
                (0..random.within(1..=9)).map(|_| "name".repeat(random.within(1..=4) as usize));
            let name = labels.collect::<Vec<_>>().join(".");
            let _ = writeln!(lines, "{address}\t{name} alias-{}", random.within(1..=9));
        }
    }
    lines
}
