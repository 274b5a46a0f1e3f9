//! Listings and savings against what `ipvsadm` 1.31 printed on Linux 6.1, byte for byte.
//!
//! A file in `tests/ipvsadm` is a command line, what it printed, what it printed to standard
//! error behind `--- stderr`, and its exit code. The tables are read from the files too: from the
//! plain listing, with the columns of the other views laid over it.

// Clippy takes functions beside the tests for no tests.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::net::IpAddr;
use std::path::Path;

use ipvs_netlink::{
    Forwarding, Persistence, PersistenceMask, RealServer, RealServerEntry, RealServerKey,
    Scheduler, SchedulerFlags, Stats, SyncDaemon, SyncRole, Timeouts, Tunnel, TunnelChecksum,
    VirtualServer, VirtualServerEntry, VirtualServerKey,
};
use ipvs_proxy::inspect::{
    Command, Header, Listed, Names, UsageError, connections, daemons, list, parse, save, timeouts,
};
use ipvs_proxy_netlink::{Family, Protocol};

const HEADER: Header = Header {
    version: 0x01_02_01,
    table_size: 4096,
};

const SERVICES: &str = "
http\t\t80/tcp\t\twww\t\t# WorldWideWeb HTTP
https\t\t443/tcp
http-alt\t8080/tcp\twebcache
domain\t\t53/udp
sip\t\t5060/udp
tproxy\t\t8081/tcp
";

#[derive(Debug, PartialEq)]
struct Capture {
    command: Vec<String>,
    stdout: String,
    stderr: String,
    exit: u8,
}

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/ipvsadm")
        .join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn capture(text: &str) -> Capture {
    let (first, rest) = text.split_once('\n').unwrap();
    let (output, exit) = rest.rsplit_once("--- exit ").unwrap();
    let (stdout, stderr) = output.split_once("--- stderr\n").unwrap_or((output, ""));
    Capture {
        command: first
            .split_whitespace()
            .skip(2)
            .map(str::to_owned)
            .collect(),
        stdout: stdout.to_owned(),
        stderr: stderr.to_owned(),
        exit: exit.trim().parse().unwrap(),
    }
}

fn file(name: &str) -> Capture {
    capture(&read(name))
}

/// Prints what a capture's command prints, of a table.
fn check(name: &str, table: &[Listed]) {
    let expected = file(name);
    let services = Names::parse(SERVICES);
    let (stdout, stderr, exit) = match parse(&expected.command, &services) {
        Ok(Command::List(options)) => {
            let names = (!options.numeric).then_some(&services);
            let asked = |e: &&Listed| options.service.is_none_or(|key| e.0.server.key == key);
            let table: Vec<Listed> = table.iter().filter(asked).cloned().collect();
            if table.is_empty() && options.service.is_some() {
                (String::new(), "No such service\n".to_owned(), 1)
            } else {
                (list(&table, HEADER, &options, names), String::new(), 0)
            }
        }
        Ok(Command::Save { numeric }) => {
            let names = (!numeric).then_some(&services);
            let table = table.iter().map(|(server, real_servers)| {
                (
                    server.server.clone(),
                    real_servers.iter().map(|e| e.server).collect(),
                )
            });
            (save(&table.collect::<Vec<_>>(), names), String::new(), 0)
        }
        other => panic!("{name}: {other:?}"),
    };
    assert_eq!(stdout, expected.stdout, "{name}");
    assert_eq!((stderr, exit), (expected.stderr, expected.exit), "{name}");
}

/// Checks each file with one of these beginnings.
fn check_all(beginnings: &[&str], table: &[Listed]) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ipvsadm");
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| {
            beginnings
                .iter()
                .any(|beginning| name.starts_with(beginning))
        })
        .collect();
    names.sort();
    assert!(names.len() >= beginnings.len(), "{beginnings:?}");
    for name in names {
        check(&name, table);
    }
}

fn address_port(text: &str) -> (IpAddr, u16) {
    let (address, port) = text.rsplit_once(':').unwrap();
    let address = address.trim_matches(['[', ']']);
    (address.parse().unwrap(), port.parse().unwrap())
}

/// The key at the start of a line, and the words behind it.
fn key<'a>(words: &[&'a str]) -> (VirtualServerKey, Vec<&'a str>) {
    if words[0] == "FWM" {
        let mark: i64 = words[1].parse().unwrap();
        let mark = u32::try_from(mark & 0xffff_ffff).unwrap();
        let v6 = words.get(2) == Some(&"IPv6");
        let family = if v6 { Family::V6 } else { Family::V4 };
        let rest = if v6 { &words[3..] } else { &words[2..] };
        return (
            VirtualServerKey::FirewallMark { mark, family },
            rest.to_vec(),
        );
    }
    let protocol = match words[0] {
        "TCP" => Protocol::Tcp,
        "UDP" => Protocol::Udp,
        "SCTP" => Protocol::Sctp,
        other => panic!("{other}"),
    };
    let (address, port) = address_port(words[1]);
    (
        VirtualServerKey::Address {
            address,
            port,
            protocol,
        },
        words[2..].to_vec(),
    )
}

fn virtual_server(line: &str) -> VirtualServer {
    let (key, words) = key(&line.split_whitespace().collect::<Vec<_>>());
    let mut server = VirtualServer {
        key,
        scheduler: words[0].parse().unwrap(),
        scheduler_flags: SchedulerFlags::NONE,
        persistence: None,
        one_packet: false,
        persistence_engine: None,
    };
    let mut words = words[1..].iter();
    while let Some(word) = words.next() {
        match *word {
            "persistent" => {
                let timeout_s = words.next().unwrap().parse().unwrap();
                let mask = PersistenceMask::Prefix(key.family().host_prefix());
                server.persistence = Some(Persistence { timeout_s, mask });
            }
            "mask" => {
                let mask = words.next().unwrap();
                let prefix = match mask.parse::<std::net::Ipv4Addr>() {
                    Ok(mask) => u8::try_from(mask.to_bits().count_ones()).unwrap(),
                    Err(_) => mask.parse().unwrap(),
                };
                server.persistence.as_mut().unwrap().mask = PersistenceMask::Prefix(prefix);
            }
            "pe" => server.persistence_engine = Some((*words.next().unwrap()).to_owned()),
            "ops" => server.one_packet = true,
            flags => {
                for flag in flags.trim_matches(['(', ')']).split(',') {
                    let bit = match flag {
                        "sh-fallback" | "mh-fallback" | "flag-1" => SchedulerFlags::FALLBACK,
                        "sh-port" | "mh-port" | "flag-2" => SchedulerFlags::PORT,
                        other => panic!("{other}"),
                    };
                    server.scheduler_flags = server.scheduler_flags.union(bit);
                }
            }
        }
    }
    server
}

fn real_server(line: &str) -> RealServerEntry {
    let words: Vec<&str> = line.split_whitespace().skip(1).collect();
    let (address, port) = address_port(words[0]);
    let forwarding = match words[1] {
        "Masq" => Forwarding::Masquerade,
        "Route" => Forwarding::DirectRoute,
        "Tunnel" => Forwarding::Tunnel(Tunnel::IpIp),
        other => panic!("{other}"),
    };
    RealServerEntry {
        server: RealServer {
            key: RealServerKey { address, port },
            forwarding,
            weight: words[2].parse().unwrap(),
            upper_threshold: 0,
            lower_threshold: 0,
        },
        stats: Stats::default(),
        active_connections: words[3].parse().unwrap(),
        inactive_connections: words[4].parse().unwrap(),
        persistent_connections: 0,
    }
}

/// The lines of a listing behind its titles.
fn lines(name: &str) -> Vec<String> {
    let lines = file(name)
        .stdout
        .lines()
        .map(str::to_owned)
        .collect::<Vec<_>>();
    let title = lines
        .iter()
        .position(|line| line.starts_with("  -> RemoteAddress"))
        .unwrap();
    lines[title + 1..].to_vec()
}

/// The table of a plain listing, in its order.
fn table(name: &str) -> Vec<Listed> {
    let mut table: Vec<Listed> = Vec::new();
    for line in lines(name) {
        if line.starts_with("  ->") {
            table.last_mut().unwrap().1.push(real_server(&line));
        } else {
            let entry = VirtualServerEntry {
                server: virtual_server(&line),
                stats: Stats::default(),
            };
            table.push((entry, Vec::new()));
        }
    }
    table
}

/// Lays a listing over a table: `apply` gets the real server or else the virtual server of each
/// line, and the words behind the address.
fn overlay(
    table: &mut [Listed],
    name: &str,
    apply: impl Fn(&mut VirtualServerEntry, Option<&mut RealServerEntry>, &[&str]),
) {
    let mut current = None;
    for line in lines(name) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words[0] == "->" {
            let (address, port) = address_port(words[1]);
            let (server, reals): &mut Listed = &mut table[current.unwrap()];
            let this = |e: &&mut RealServerEntry| e.server.key == RealServerKey { address, port };
            apply(server, reals.iter_mut().find(this), &words[2..]);
        } else {
            let (key, words) = key(&words);
            let index = table
                .iter()
                .position(|(entry, _)| entry.server.key == key)
                .unwrap();
            current = Some(index);
            apply(&mut table[index].0, None, &words);
        }
    }
}

fn numbers(words: &[&str]) -> [u64; 5] {
    let numbers: Vec<u64> = words.iter().map(|word| word.parse().unwrap()).collect();
    numbers.try_into().unwrap()
}

fn lay_stats(table: &mut [Listed], name: &str) {
    overlay(table, name, |server, real, words| {
        let stats = real.map_or(&mut server.stats, |real| &mut real.stats);
        let [connections, packets_in, packets_out, bytes_in, bytes_out] = numbers(words);
        *stats = Stats {
            connections,
            packets_in,
            packets_out,
            bytes_in,
            bytes_out,
            ..*stats
        };
    });
}

fn lay_rates(table: &mut [Listed], name: &str) {
    overlay(table, name, |server, real, words| {
        let stats = real.map_or(&mut server.stats, |real| &mut real.stats);
        let [a, b, c, d, e] = numbers(words);
        (
            stats.connections_per_s,
            stats.packets_in_per_s,
            stats.packets_out_per_s,
        ) = (a, b, c);
        (stats.bytes_in_per_s, stats.bytes_out_per_s) = (d, e);
    });
}

/// All schedulers, flags, families, tunnels and forms of persistence, in the kernel's order.
fn mixed() -> Vec<Listed> {
    let mut table = table("02-Ln-nosort.txt");
    overlay(&mut table, "02-Ln-tun-info.txt", |_, real, words| {
        let Some(real) = real else { return };
        let parts: Vec<&str> = words[1].split(':').collect();
        let checksum = |word: &str| match word {
            "-c" => TunnelChecksum::None,
            "+c" => TunnelChecksum::On,
            "r+c" => TunnelChecksum::Remote,
            other => panic!("{other}"),
        };
        let tunnel = match parts[..] {
            ["n/a"] => return,
            ["ipip"] => Tunnel::IpIp,
            ["gre", sum] => Tunnel::Gre {
                checksum: checksum(sum),
            },
            ["gue", port, sum] => Tunnel::Gue {
                port: port.parse().unwrap(),
                checksum: checksum(sum),
            },
            _ => panic!("{parts:?}"),
        };
        real.server.forwarding = Forwarding::Tunnel(tunnel);
    });
    overlay(&mut table, "02-Ln-thresholds.txt", |_, real, words| {
        if let Some(real) = real {
            real.server.upper_threshold = words[0].parse().unwrap();
            real.server.lower_threshold = words[1].parse().unwrap();
        }
    });
    table
}

#[test]
fn an_empty_table() {
    check_all(&["01-"], &[]);
}

#[test]
fn a_mixed_table_whole_in_parts_and_saved() {
    check_all(&["02-", "03-", "04-"], &mixed());
}

#[test]
fn a_table_with_traffic() {
    let mut table = table("11-Ln-traffic.txt");
    lay_stats(&mut table, "11-Ln-stats-traffic.txt");
    lay_rates(&mut table, "11-Ln-rate-traffic.txt");
    overlay(
        &mut table,
        "11-Ln-persistent-conn-traffic.txt",
        |_, real, words| {
            if let Some(real) = real {
                real.persistent_connections = words[1].parse().unwrap();
            }
        },
    );
    check_all(&["11-"], &table);
}

/// What a capture's command prints of these rows of `/proc/net/ip_vs_conn`.
fn printed(name: &str, rows: &str) -> String {
    let services = Names::parse(SERVICES);
    let Ok(Command::Connections { engines, numeric }) = parse(&file(name).command, &services)
    else {
        panic!("{name}")
    };
    let mut out = Vec::new();
    let names = (!numeric).then_some(&services);
    connections(rows.as_bytes(), engines, names, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn connections_of_all_kinds() {
    let rows = file("30-conn-proc.txt").stdout;
    // Taken a second apart: what is left of the time differs.
    let timeless = |text: &str| {
        let line = |line: &str| match line.split_whitespace().nth(1) {
            Some(time) if time.contains(':') => line.replacen(time, "", 1),
            _ => line.to_owned(),
        };
        text.lines().map(line).collect::<Vec<_>>()
    };
    for name in [
        "30-conn-Lc.txt",
        "30-conn-Lnc.txt",
        "30-conn-Lnc-persistent-conn.txt",
    ] {
        let expected = timeless(&file(name).stdout);
        assert_eq!(timeless(&printed(name, &rows)), expected, "{name}");
    }
    let none: String = rows.lines().take(1).collect();
    assert_eq!(
        printed("31-Lnc-empty.txt", &none),
        file("31-Lnc-empty.txt").stdout
    );
}

#[test]
fn rare_connections() {
    let title = "Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData\n";
    let rows = "AH  C0A80001 0000 C0A80002 0000 C0A80003 0000 NONE              0\n\
        TCP fd00:0000:0000:0000:0000:0000:0000:0001 FFFF 0000:0000:0000:0000:0000:0000:0000:0064 0000 0A000001 0050 FIN_WAIT     360000 sip a@b\n\
        IP_250 C0A80001 0000 C0A80002 0000 C0A80003 0000 A_STATE_OF_16_LE 59\n";
    let listed = printed("30-conn-Lnc-persistent-conn.txt", &format!("{title}{rows}"));
    let expected = [
        "AH  00:00  NONE        192.168.0.1:0      192.168.0.2:0      192.168.0.3:0",
        "TCP 6000:00 FIN_WAIT    [fd00::1]:65535    [::64]:0           10.0.0.1:80      sip                a@b",
        "IP_250 00:59  A_STATE_OF_16_LE 192.168.0.1:0      192.168.0.2:0      192.168.0.3:0",
    ];
    assert_eq!(listed.lines().skip(2).collect::<Vec<_>>(), expected);
    for row in [
        "TCP",
        "TCP C0A80001 0000 C0A80002 0000 C0A80003 0000 NONE x",
        "\n",
    ] {
        let rows = format!("{title}{row}\n");
        let outcome = connections(rows.as_bytes(), false, None, Vec::new());
        let kind = outcome.map_err(|error| error.kind());
        assert_eq!(kind, Err(std::io::ErrorKind::InvalidData), "{row}");
    }
}

#[test]
fn timeouts_and_daemons() {
    let [tcp, tcp_fin, udp] = [900, 120, 30].map(std::time::Duration::from_secs);
    let listed = timeouts(&Timeouts { tcp, tcp_fin, udp });
    assert_eq!(listed, file("32-timeout.txt").stdout);
    let backup = SyncDaemon {
        role: SyncRole::Backup,
        interface: "eth1".to_owned(),
        id: 9,
        longest_message: Some(1400),
        group: Some([224, 0, 0, 99].into()),
        port: Some(8849),
        ttl: Some(2),
    };
    let master = SyncDaemon {
        role: SyncRole::Master,
        id: 7,
        longest_message: Some(1472),
        group: Some([224, 0, 0, 81].into()),
        port: Some(8848),
        ttl: Some(1),
        ..backup.clone()
    };
    assert_eq!(
        daemons(&[backup, master.clone()]),
        file("33-daemon.txt").stdout
    );
    let old = SyncDaemon {
        longest_message: None,
        group: None,
        port: None,
        ttl: None,
        ..master
    };
    assert_eq!(
        daemons(&[old]),
        "master sync daemon (mcast=eth1, syncid=7)\n"
    );
    assert_eq!(daemons(&[]), "");
}

#[test]
fn large_numbers() {
    let real = |address: &str| {
        let (address, port) = address_port(address);
        RealServerEntry {
            server: RealServer {
                key: RealServerKey { address, port },
                forwarding: Forwarding::Masquerade,
                weight: 1,
                upper_threshold: 0,
                lower_threshold: 0,
            },
            stats: Stats::default(),
            active_connections: 0,
            inactive_connections: 0,
            persistent_connections: 0,
        }
    };
    let server = VirtualServerEntry {
        server: virtual_server("TCP 10.96.0.12:443 rr persistent 10800"),
        stats: Stats::default(),
    };
    let mut table = vec![(server, vec![real("10.244.1.2:443"), real("10.244.2.2:443")])];
    for beginning in ["13-stats-over-100M", "14-stats-over-1G"] {
        lay_stats(&mut table, &format!("{beginning}-exact.txt"));
        check_all(&[beginning], &table);
    }
    for (plain, exact) in [
        ("13-rate-bulk.txt", "13-rate-bulk-exact.txt"),
        ("14-rate-over-1G.txt", "14-rate-over-1G-exact.txt"),
    ] {
        // Taken a moment apart, so only one of the two can be had from its numbers.
        lay_rates(&mut table, exact);
        check(exact, &table);
        assert_eq!(lines(plain).len(), lines(exact).len());
    }
    check("19-list-long.txt", &{
        let server = VirtualServerEntry {
            server: virtual_server("TCP 10.96.0.1:80 rr"),
            stats: Stats::default(),
        };
        vec![(server, vec![real("10.0.0.1:80")])]
    });
}

#[test]
fn the_order_that_is_no_order() {
    for name in ["20-sort-far", "21-sort-marks", "22-sort-random"] {
        let table = table(&format!("{name}-nosort.txt"));
        check_all(&[name], &table);
    }
}

#[test]
fn scheduler_flags_without_a_name() {
    let with = |line: &str, bits| {
        let server = VirtualServer {
            scheduler_flags: SchedulerFlags::from_bits(bits),
            ..virtual_server(line)
        };
        (
            VirtualServerEntry {
                server,
                stats: Stats::default(),
            },
            Vec::new(),
        )
    };
    let table = [
        with("TCP 10.96.0.1:80 mh", 4),
        with("TCP 10.96.0.2:80 rr", 7),
        with("TCP 10.96.0.3:80 sh", 6),
    ];
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let Ok(Command::List(options)) = parse(&words("-L -n"), &Names::default()) else {
        panic!()
    };
    let mut out = list(&table, HEADER, &options, None);
    out += &save(&table.map(|(entry, _)| (entry.server, Vec::new())), None);
    assert_eq!(out, file("10-flag3.txt").stdout);
}

#[test]
fn wrong_command_lines() {
    let mut checked = 0;
    let listing = ["-L", "-Ln", "-S", "-n", "-t", "--bogus"];
    for block in read("09-errors.txt").split("\n$ ") {
        let capture = capture(&format!("$ {}", block.trim_start_matches("$ ")));
        let first = capture.command.first().map_or("", String::as_str);
        // Others change the table, or are pipes.
        if !listing.contains(&first) || !block.trim_start_matches("$ ").starts_with("ipvsadm") {
            continue;
        }
        let outcome = parse(&capture.command, &Names::parse(SERVICES));
        if capture.exit == 0 {
            assert!(outcome.is_ok(), "{:?}: {outcome:?}", capture.command);
        } else {
            let Err(UsageError { text, exit }) = outcome else {
                panic!("{:?}", capture.command)
            };
            let expected = (capture.stderr, capture.exit);
            assert_eq!(
                (format!("{text}\n"), exit),
                expected,
                "{:?}",
                capture.command
            );
        }
        checked += 1;
    }
    assert!(checked >= 15, "{checked}");
}

#[test]
fn every_scheduler_is_written_as_the_kernel_names_it() {
    for name in Scheduler::names() {
        let server = virtual_server(&format!("TCP 10.0.0.1:80 {name}"));
        assert_eq!(
            save(&[(server, Vec::new())], None),
            format!("-A -t 10.0.0.1:80 -s {name}\n")
        );
    }
}
