use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use ipvs_netlink::*;
use ipvs_proxy_netlink::{Family, Protocol};
use proptest::prelude::*;

use super::names::in_time;
use super::*;

fn parsed(args: &str) -> Result<Command, UsageError> {
    let args: Vec<String> = args
        .split(' ')
        .filter(|a| !a.is_empty())
        .map(str::to_owned)
        .collect();
    parse(&args, &Names::parse("http 80/tcp www\ndomain 53/udp\n"))
}

fn options(args: &str) -> ListOptions {
    match parsed(args) {
        Ok(Command::List(options)) => options,
        other => panic!("{args}: {other:?}"),
    }
}

fn refusal(args: &str) -> (String, u8) {
    match parsed(args) {
        Err(UsageError { text, exit }) => (text, exit),
        other => panic!("{args}: {other:?}"),
    }
}

fn tcp(address: &str, port: u16) -> Option<VirtualServerKey> {
    let address = address.parse().unwrap();
    Some(VirtualServerKey::Address {
        address,
        port,
        protocol: Protocol::Tcp,
    })
}

#[test]
fn no_arguments_list_with_names() {
    let all = ListOptions {
        view: View::Plain,
        numeric: false,
        exact: false,
        sort: true,
        service: None,
    };
    assert_eq!(options(""), all);
    assert_eq!(options("-L"), all);
    assert_eq!(options("--list --sort --syncid 3 --"), all);
    let all = ListOptions {
        numeric: true,
        ..all
    };
    for args in ["-Ln", "-ln", "-l -n", "--list --numeric"] {
        assert_eq!(options(args), all, "{args}");
    }
    let exact = ListOptions {
        exact: true,
        sort: false,
        view: View::Stats,
        ..all
    };
    assert_eq!(options("-LnX --nosort --stats"), exact);
}

#[test]
fn the_first_view_in_the_order_of_ipvsadm_counts() {
    assert_eq!(options("-L --tun-info").view, View::Tunnels);
    assert_eq!(
        options("-L --tun-info --persistent-conn").view,
        View::PersistentConnections
    );
    assert_eq!(
        options("-L --persistent-conn --thresholds").view,
        View::Thresholds
    );
    assert_eq!(options("-L --thresholds --rate").view, View::Rates);
    assert_eq!(options("-L --rate --stats --thresholds").view, View::Stats);
}

#[test]
fn services_in_all_spellings() {
    for args in [
        "-Ln -t 10.0.0.1:80",
        "-Lnt10.0.0.1:80",
        "-Ln -t=10.0.0.1:80",
        "-Ln --tcp-service=10.0.0.1:80",
        "-Ln --tcp-service 10.0.0.1:http",
        "-Ln -t 10.0.0.1:www",
        "-Ln -t 10.0.0.01:080",
    ] {
        assert_eq!(options(args).service, tcp("10.0.0.1", 80), "{args}");
    }
    assert_eq!(options("-L -t 10.0.0.012").service, tcp("10.0.0.10", 0));
    assert_eq!(options("-L -t [fd00::1]:80").service, tcp("fd00::1", 80));
    for (service, address) in [
        ("80:80", "0.0.0.80"),
        ("1.2.3:80", "1.2.0.3"),
        ("1.65535:80", "1.0.255.255"),
        ("017.1:80", "15.0.0.1"),
        ("4294967295:80", "255.255.255.255"),
    ] {
        let service = options(&format!("-L -t {service}")).service;
        assert_eq!(service, tcp(address, 80));
    }
    assert_eq!(options("-L -t [10.0.0.1]:80").service, tcp("10.0.0.1", 0));
    assert_eq!(options("-L -t fd00::1").service, tcp("fd00::1", 0));
    let Some(VirtualServerKey::Address { protocol, port, .. }) =
        options("-L -u 1.2.3.4:domain").service
    else {
        panic!()
    };
    assert_eq!((protocol, port), (Protocol::Udp, 53));
    let mark = |mark, family| Some(VirtualServerKey::FirewallMark { mark, family });
    assert_eq!(options("-L -f 007").service, mark(7, Family::V4));
    assert_eq!(
        options("-L -f 4294967295 -6 -6").service,
        mark(u32::MAX, Family::V6)
    );
}

#[test]
fn wrong_services() {
    for service in [
        "80",
        "999.1.1.1:80",
        "1.2.3.4:70000",
        "1.2.3.4:-1",
        "1.2.3.4:",
        "1.2.3.4:0x50",
        ":80",
        "[fd00::1]",
        "[fd00::1:80",
        "[fd00::1]80",
        "1.2.3.4.5:80",
        "1.2.3.:80",
        "1..2:80",
        ".1:80",
        "08.1.1.1:80",
        "256.1:80",
        "1.2.65536:80",
        "4294967296:80",
        "1.2.3.4:domain",
    ] {
        let expected = (
            "illegal virtual server address[:port] specified".to_owned(),
            2,
        );
        assert_eq!(refusal(&format!("-L -t {service}")), expected, "{service}");
    }
    for mark in ["0", "abc", "-1", "4294967296", "0x10"] {
        let expected = (format!("invalid fwmark value `{mark}' specified"), 2);
        assert_eq!(refusal(&format!("-L -f {mark}")), expected);
    }
}

#[test]
fn what_ipvsadm_and_popt_refuse() {
    let try_help = "Try `ipvsadm -h' or 'ipvsadm --help' for more information.";
    for (args, text, exit) in [
        ("foo", try_help, 255),
        ("-nL", try_help, 255),
        ("foo -Ln", "unexpected argument foo", 2),
        ("-Ln -- -foo", "unexpected argument -foo", 2),
        ("-Ln -", "unexpected argument -", 2),
        ("-LnZ", "invalid option `-LnZ'", 2),
        ("-Lnz", "-Lnz: unknown option", 255),
        ("-L --numer", "--numer: unknown option", 255),
        (
            "-L --stats=3",
            "--stats=3: option does not take an argument",
            255,
        ),
        ("-L --tcp-service", "--tcp-service: missing argument", 255),
        ("-L -6 -f 5", "-6 used before -f\n", 2),
        (
            "-L -stats",
            "Illegal 'scheduler' option with the 'list' command",
            2,
        ),
        (
            "-L -p 60",
            "Illegal 'persistent' option with the 'list' command",
            2,
        ),
        (
            "-L -p -n",
            "Illegal 'persistent' option with the 'list' command",
            2,
        ),
        (
            "-L -m",
            "Illegal 'forwarding-method' option with the 'list' command",
            2,
        ),
        (
            "-L -m -g",
            "multiple 'forwarding-method' options specified",
            2,
        ),
        ("-L --exact -X", "multiple 'exact' options specified", 2),
        (
            "-S --stats",
            "Illegal 'stats' option with the 'save' command",
            2,
        ),
        (
            "-L -c --daemon",
            "The option 'daemon' conflicts with the 'connection' option in the 'list' command",
            2,
        ),
        (
            "-L --daemon --rate",
            "options conflicts in the list command",
            2,
        ),
    ] {
        assert_eq!(refusal(args), (text.to_owned(), exit), "{args}");
    }
}

#[test]
fn what_changes_something_is_refused_by_name() {
    for (args, name, instead) in [
        ("-A -t 10.0.0.1:80", "add-service", "change the Service"),
        ("-C", "flush", "change the Service"),
        ("-R", "restore", "use the original ipvsadm"),
        ("--set 1 2 3", "set", "--ipvs-tcp-timeout"),
        ("-Z", "zero", "use the original ipvsadm"),
        (
            "--start-daemon master",
            "start-daemon",
            "use the original ipvsadm",
        ),
    ] {
        let (text, exit) = refusal(args);
        let start = format!("the '{name}' command is refused: this ipvsadm only lists; ");
        assert!(
            text.starts_with(&start) && text.contains(instead) && !text.contains('\n'),
            "{text}"
        );
        assert_eq!(exit, 2);
    }
}

#[test]
fn a_lookup_that_is_not_answered_ends() {
    let (told, never) = std::sync::mpsc::channel::<()>();
    let patience = Duration::from_millis(10);
    assert_eq!(in_time(patience, move || never.recv()), None);
    drop(told);
    assert_eq!(in_time(Duration::from_secs(60), || 1), Some(1));
}

#[test]
fn other_commands() {
    assert_eq!(parsed("-S"), Ok(Command::Save { numeric: false }));
    assert_eq!(parsed("-Sn"), Ok(Command::Save { numeric: true }));
    let connections = |engines, numeric| Ok(Command::Connections { engines, numeric });
    assert_eq!(parsed("-Lc"), connections(false, false));
    assert_eq!(
        parsed("-lnc --exact --nosort --tun-info"),
        connections(false, true)
    );
    assert_eq!(
        parsed("-L --connection --persistent-conn"),
        connections(true, false)
    );
    assert_eq!(parsed("-Ln --timeout"), Ok(Command::Timeouts));
    assert_eq!(parsed("-L --daemon"), Ok(Command::Daemons));
    assert_eq!(parsed("-h -n"), Ok(Command::Help));
    assert_eq!(parsed("--version"), Ok(Command::Version));
}

#[test]
fn errors_of_the_kernel_in_the_words_of_ipvsadm() {
    let second = "Are you sure that IP Virtual Server is built in the kernel or as module?";
    let text = no_ipvs(Error::NoModule).text;
    assert_eq!(
        text,
        format!("Can't initialize ipvs: Protocol not available\n{second}")
    );
    let error = failed(Error::Permission {
        request: String::new(),
    });
    assert_eq!(
        error.text,
        format!("Can't initialize ipvs: Permission denied (you must be root)\n{second}")
    );
    assert_eq!(error.exit, 2);
}

fn listed(vip: &str, port: u16, reals: &[(&str, u16)]) -> Listed {
    let key = tcp(vip, port).unwrap();
    let real = |(address, port): &(&str, u16)| RealServerEntry {
        server: RealServer {
            key: RealServerKey {
                address: address.parse().unwrap(),
                port: *port,
            },
            forwarding: Forwarding::Masquerade,
            weight: 1,
            upper_threshold: 0,
            lower_threshold: 0,
        },
        stats: Stats::default(),
        active_connections: 0,
        inactive_connections: 0,
        persistent_connections: 0,
    };
    let server = VirtualServer {
        key,
        scheduler: Scheduler::RoundRobin,
        scheduler_flags: SchedulerFlags::NONE,
        persistence: None,
        one_packet: false,
        persistence_engine: None,
    };
    (
        VirtualServerEntry {
            server,
            stats: Stats::default(),
        },
        reals.iter().map(real).collect(),
    )
}

#[test]
fn names_are_cut_as_ipvsadm_cuts_them() {
    let mut names = Names::parse("http 80/tcp");
    names.add_hosts(
        "10.0.0.1  averyveryverylonghostname.with-a-long-domain-name.svc.cluster.local alias\n\
         10.0.0.2 short\n\
         fd00::2 averyveryverylonghostname6.with-a-long-domain-name.svc.cluster.local\n",
    );
    let table = [
        listed("10.0.0.1", 80, &[("10.0.0.2", 80), ("10.0.0.3", 81)]),
        listed("fd00::1", 80, &[("fd00::2", 8080)]),
    ];
    let options = ListOptions {
        service: tcp("10.0.0.1", 80),
        ..options("-L")
    };
    let header = Header {
        version: 0x01_02_01,
        table_size: 4096,
    };
    let out = list(&table, header, &options, Some(&names));
    let lines: Vec<&str> = out.lines().skip(2).collect();
    assert_eq!(
        lines,
        [
            "TCP  averyveryverylonghostname.wi rr",
            "  -> short:http                   Masq    1      0          0         ",
            "  -> 10.0.0.3:81                  Masq    1      0          0         ",
            "TCP  [fd00::1]:http rr",
            "  -> [averyveryverylonghostname6.with-a-long-domain-name.svc.clu Masq    1      0          0         ",
        ]
    );
    let table = table.map(|(s, r)| (s.server, r.iter().map(|e| e.server).collect()));
    let out = save(&table, Some(&names));
    let first = "-A -t averyveryverylonghostname.with-a-long-domain-name.svc.clust -s rr";
    assert_eq!(out.lines().next(), Some(first));
}

#[test]
fn rare_values() {
    let (mut server, mut reals) = listed("::1.2.3.4", 80, &[("::ffff:1.2.3.4", 1), ("::1", 2)]);
    server.server.persistence = Some(Persistence {
        timeout_s: 9,
        mask: PersistenceMask::Prefix(0),
    });
    reals[0].server.forwarding = Forwarding::Local;
    reals[1].server.forwarding = Forwarding::Bypass;
    let out = list(
        &[(server, reals)],
        Header {
            version: 0,
            table_size: 1,
        },
        &options("-L"),
        None,
    );
    assert_eq!(
        out.lines().collect::<Vec<_>>(),
        [
            "IP Virtual Server version 0.0.0 (size=1)",
            "Prot LocalAddress:Port Scheduler Flags",
            "  -> RemoteAddress:Port           Forward Weight ActiveConn InActConn",
            "TCP  [::1.2.3.4]:80 rr persistent 9 mask 0",
            "  -> [::1]:2                      Bypass  1      0          0         ",
            "  -> [::ffff:1.2.3.4]:1           Local   1      0          0         ",
        ]
    );
    let (mut server, _) = listed("10.0.0.1", 80, &[]);
    for (prefix, mask) in [(0, "0.0.0.0"), (1, "128.0.0.0"), (31, "255.255.255.254")] {
        server.server.persistence = Some(Persistence {
            timeout_s: 9,
            mask: PersistenceMask::Prefix(prefix),
        });
        let out = save(&[(server.server.clone(), Vec::new())], None);
        assert_eq!(out, format!("-A -t 10.0.0.1:80 -s rr -p 9 -M {mask}\n"));
    }
}

#[test]
fn numbers_are_shortened_but_never_rounded() {
    let (mut server, _) = listed("10.0.0.1", 80, &[]);
    let show = |number, server: &mut VirtualServerEntry| {
        server.stats.bytes_in = number;
        let table = [(server.clone(), Vec::new())];
        let out = list(
            &table,
            Header {
                version: 0,
                table_size: 1,
            },
            &options("-L --stats"),
            None,
        );
        out.split_whitespace().rev().nth(1).unwrap().to_owned()
    };
    for (number, text) in [
        (99_999_999, "99999999"),
        (100_000_000, "100000K"),
        (999_999_999, "999999K"),
        (1_000_000_000, "1000M"),
        (99_999_999_999, "99999M"),
        (100_000_000_000, "100G"),
        (100_000_000_000_000, "100T"),
        (u64::MAX, "18446744T"),
    ] {
        assert_eq!(show(number, &mut server), text);
    }
}

#[test]
fn services_that_are_not_in_form_are_skipped() {
    let names = Names::parse("# none\nhttp\nx y/tcp\nftp 99999/tcp\nok 7/udp # c\nlate 7/udp\n");
    assert_eq!(names.port(7, Protocol::Udp), Some("ok"));
    assert_eq!(names.port_of("late", Protocol::Udp), Some(7));
    assert_eq!(names.port_of("ftp", Protocol::Tcp), None);
    assert_eq!(names.port(7, Protocol::Tcp), None);
}

fn any_address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        any::<u32>().prop_map(|bits| IpAddr::V4(Ipv4Addr::from_bits(bits))),
        any::<u128>().prop_map(|bits| IpAddr::V6(Ipv6Addr::from_bits(bits))),
    ]
}

type AnyReal = (IpAddr, u16, u32, u64);

fn any_table() -> impl Strategy<Value = Vec<Listed>> {
    let key = prop_oneof![
        (any_address(), any::<u16>(), any::<u8>()).prop_map(|(address, port, protocol)| {
            let protocol = Protocol::from_number(protocol);
            VirtualServerKey::Address {
                address,
                port,
                protocol,
            }
        }),
        any::<u32>().prop_map(|mark| VirtualServerKey::FirewallMark {
            mark,
            family: Family::V6
        }),
    ];
    let real = (any_address(), any::<u16>(), any::<u32>(), any::<u64>());
    let server = (
        key,
        any::<u8>(),
        proptest::option::of(any::<u8>()),
        proptest::collection::vec(real, 0..6),
    );
    proptest::collection::vec(server, 0..12).prop_map(|servers| {
        let entry = |(key, flags, prefix, reals): (_, _, Option<u8>, Vec<AnyReal>)| {
            let (mut entry, _) = listed("10.0.0.1", 1, &[]);
            entry.server.key = key;
            entry.server.scheduler_flags = SchedulerFlags::from_bits(flags);
            entry.server.persistence = prefix.map(|prefix| Persistence {
                timeout_s: 1,
                mask: PersistenceMask::Prefix(prefix),
            });
            let real = |(address, port, weight, number)| {
                let mut real = listed("10.0.0.1", 1, &[("10.0.0.1", 1)]).1.remove(0);
                real.server.key = RealServerKey { address, port };
                real.server.weight = weight;
                real.stats.bytes_in = number;
                real
            };
            (entry, reals.into_iter().map(real).collect())
        };
        servers.into_iter().map(entry).collect()
    })
}

proptest! {
    #[test]
    fn any_table_is_listed_whole(table in any_table(), view in 0..6_usize) {
        let view = ["", "--stats", "--rate", "--thresholds", "--persistent-conn", "--tun-info"][view];
        let lines: usize = table.iter().map(|(_, reals)| 1 + reals.len()).sum();
        let header = Header { version: u32::MAX, table_size: u32::MAX };
        for sort in ["", "--nosort"] {
            let options = options(&format!("-L {view} {sort}"));
            let out = list(&table, header, &options, Some(&Names::default()));
            prop_assert_eq!(out.lines().count(), lines + 3);
        }
        let saved: Vec<Saved> = table
            .into_iter()
            .map(|(s, reals)| (s.server, reals.into_iter().map(|e| e.server).collect()))
            .collect();
        prop_assert_eq!(save(&saved, None).lines().count(), lines);
    }

    #[test]
    fn no_command_line_is_too_strange(args in proptest::collection::vec("[-=]{0,3}[a-zA-Z0-9:.é\\[\\]]{0,6}", 0..5)) {
        // Names of hosts are looked up, so none of these may look like one.
        prop_assume!(!args.iter().any(|arg| arg.contains(['t', 'u', 'v', 'c'])));
        let _ = parse(&args, &Names::default());
    }
}

/// The name server answers for some addresses, and never for others.
#[test]
fn names_that_nobody_tells_do_not_hold_up_the_rest() {
    use std::os::unix::fs::PermissionsExt as _;

    let getent = std::env::temp_dir().join(format!("ipvs-proxy-getent-{}", std::process::id()));
    let script = "#!/bin/sh\n\
        [ \"$1\" = -s ] && { echo 10.0.0.1 of-file; exit; }\n\
        shift\n\
        for address; do case $address in\n\
            10.0.0.2) echo 10.0.0.2 of-dns;;\n\
            10.0.1.*) exec sleep 600;;\n\
        esac; done\n";
    let text = getent.with_extension("text");
    std::fs::write(&text, script).unwrap();
    std::fs::set_permissions(&text, std::fs::Permissions::from_mode(0o755)).unwrap();
    // What this process has open for writing can't be run.
    let copied = std::process::Command::new("cp")
        .arg(&text)
        .arg(&getent)
        .status();
    assert!(copied.unwrap().success());
    let address = |text: String| text.parse::<IpAddr>().unwrap();
    let known = [1, 2].map(|n| address(format!("10.0.0.{n}")));
    let silent = (0..200).map(|n| address(format!("10.0.1.{n}")));
    let addresses = known.into_iter().chain(silent).collect();
    let started = Instant::now();
    let deadline = started + Duration::from_secs(3);
    let names = Names::default().with_hosts_of(&getent, &addresses, deadline);
    std::fs::remove_file(&getent).unwrap();
    std::fs::remove_file(&text).unwrap();
    assert!(
        started.elapsed() < Duration::from_secs(20),
        "one deadline over all"
    );
    let names = ["10.0.0.1", "10.0.0.2", "10.0.1.7"].map(|text| names.host(text.parse().unwrap()));
    assert_eq!(names, [Some("of-file"), Some("of-dns"), None]);
}
