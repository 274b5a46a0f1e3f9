//! The IPVS client against the kernel, with the real `ipvsadm` as the second pair of eyes: it reads
//! what the client wrote, and the client reads what it wrote.

use std::net::{IpAddr, UdpSocket};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ipvs_netlink::codec::Unsendable;
use ipvs_netlink::{
    Client, Error, Forwarding, Persistence, PersistenceMask, RealServer, RealServerKey, Request,
    Scheduler, SchedulerFlags, Stats, Timeouts, Tunnel, TunnelChecksum, VirtualServer,
    VirtualServerKey,
};
use ipvs_proxy_netlink::{Family, Protocol};

const SCHEDULERS: [&str; 13] = [
    "rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "mh", "sed", "nq", "fo", "ovf",
];

/// Runs a test in a network namespace of its own, where the IPVS table is empty.
fn with_client(test: impl FnOnce(&mut Client) + Send) {
    tests::netns::run(|| test(&mut Client::open().unwrap()));
}

fn ipvsadm(arguments: &str) -> String {
    ipvsadm_with_input(arguments, "")
}

fn ipvsadm_with_input(arguments: &str, input: &str) -> String {
    let mut child = Command::new("ipvsadm")
        .args(arguments.split_whitespace())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && complaint.is_empty(),
        "{arguments}: {complaint}"
    );
    String::from_utf8(output.stdout).unwrap()
}

/// What `ipvsadm -Sn` prints.
fn saved() -> String {
    ipvsadm("-S -n")
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn tcp(address: &str, port: u16) -> VirtualServerKey {
    VirtualServerKey::Address {
        address: ip(address),
        port,
        protocol: Protocol::Tcp,
    }
}

fn udp(address: &str, port: u16) -> VirtualServerKey {
    VirtualServerKey::Address {
        address: ip(address),
        port,
        protocol: Protocol::Udp,
    }
}

fn mark(mark: u32, family: Family) -> VirtualServerKey {
    VirtualServerKey::FirewallMark { mark, family }
}

fn server(key: VirtualServerKey, scheduler: &str) -> VirtualServer {
    VirtualServer {
        key,
        scheduler: scheduler.parse().unwrap(),
        scheduler_flags: SchedulerFlags::NONE,
        persistence: None,
        one_packet: false,
        persistence_engine: None,
    }
}

fn persistent(key: VirtualServerKey, scheduler: &str, timeout_s: u32, prefix: u8) -> VirtualServer {
    VirtualServer {
        persistence: Some(Persistence {
            timeout_s,
            mask: PersistenceMask::Prefix(prefix),
        }),
        ..server(key, scheduler)
    }
}

fn real(address: &str, port: u16, forwarding: Forwarding) -> RealServer {
    RealServer {
        key: RealServerKey {
            address: ip(address),
            port,
        },
        forwarding,
        weight: 1,
        upper_threshold: 0,
        lower_threshold: 0,
    }
}

fn apply_all(client: &mut Client, requests: &[Request<'_>]) {
    for result in client.apply(requests) {
        result.unwrap();
    }
}

fn apply_one(client: &mut Client, request: Request<'_>) -> Result<(), Error> {
    client.apply(&[request]).pop().unwrap()
}

fn add(client: &mut Client, servers: &[VirtualServer]) {
    let requests: Vec<_> = servers.iter().map(Request::AddVirtualServer).collect();
    apply_all(client, &requests);
}

fn listed(client: &mut Client) -> Vec<VirtualServer> {
    let mut servers: Vec<_> = client
        .virtual_servers()
        .unwrap()
        .into_iter()
        .map(|entry| entry.server)
        .collect();
    servers.sort_by_key(|server| server.key);
    servers
}

fn listed_real(client: &mut Client, of: VirtualServerKey) -> Vec<RealServer> {
    let mut servers: Vec<_> = client
        .real_servers(of)
        .unwrap()
        .into_iter()
        .map(|entry| entry.server)
        .collect();
    servers.sort_by_key(|server| server.key);
    servers
}

#[test]
fn every_scheduler_is_taken_and_listed() {
    with_client(|client| {
        let servers: Vec<_> = SCHEDULERS
            .iter()
            .zip(1..)
            .map(|(name, port)| server(tcp("10.0.0.1", port), name))
            .collect();
        add(client, &servers);
        assert_eq!(listed(client), servers);
        let expected: String = SCHEDULERS
            .iter()
            .zip(1..)
            .map(|(name, port)| format!("-A -t 10.0.0.1:{port} -s {name}\n"))
            .collect();
        assert_eq!(saved(), expected);

        // Linux 5.11 on, and not in every kernel.
        let two = server(tcp("10.0.0.1", 99), "twos");
        match apply_one(client, Request::AddVirtualServer(&two)) {
            Ok(()) | Err(Error::NoScheduler { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    });
}

#[test]
fn unknown_schedulers_and_engines_are_refused() {
    with_client(|client| {
        let known = server(tcp("10.0.0.1", 80), "rr");
        add(client, std::slice::from_ref(&known));
        let unknown = server(tcp("10.0.0.1", 80), "none-such");
        let engine = VirtualServer {
            persistence_engine: Some("none-such".to_owned()),
            ..persistent(udp("10.0.0.2", 80), "rr", 60, 32)
        };
        let new = server(tcp("10.0.0.2", 80), "none-such");
        let requests = [
            Request::UpdateVirtualServer(&unknown),
            Request::AddVirtualServer(&new),
            Request::AddVirtualServer(&engine),
        ];
        for result in client.apply(&requests) {
            assert!(
                matches!(result, Err(Error::NoScheduler { .. })),
                "{result:?}"
            );
        }
        assert_eq!(listed(client), [known]);
    });
}

#[test]
fn scheduler_flags_are_those_of_ipvsadm() {
    with_client(|client| {
        let both = SchedulerFlags::FALLBACK.union(SchedulerFlags::PORT);
        let cases = [
            ("sh", SchedulerFlags::FALLBACK, "sh-fallback"),
            ("sh", SchedulerFlags::PORT, "sh-port"),
            ("mh", both, "mh-fallback,mh-port"),
            ("rr", SchedulerFlags::from_bits(1), "flag-1"),
            ("rr", SchedulerFlags::from_bits(7), "flag-1,flag-2,flag-3"),
        ];
        let mut expected = String::new();
        let mut servers = Vec::new();
        for ((name, flags, shown), port) in cases.into_iter().zip(1..) {
            servers.push(VirtualServer {
                scheduler_flags: flags,
                ..server(tcp("10.0.0.1", port), name)
            });
            expected += &format!("-A -t 10.0.0.1:{port} -s {name} -b {shown}\n");
        }
        add(client, &servers);
        assert_eq!(saved(), expected);
        assert_eq!(listed(client), servers);
    });
}

#[test]
fn persistence_of_both_families() {
    with_client(|client| {
        let servers = [
            persistent(tcp("10.0.0.1", 1), "rr", 10800, 32),
            persistent(tcp("10.0.0.1", 2), "rr", 60, 24),
            persistent(tcp("10.0.0.1", 3), "rr", 60, 0),
            // All ports need persistence.
            persistent(tcp("10.0.0.2", 0), "rr", 60, 32),
            persistent(tcp("fd00::1", 1), "rr", 10800, 128),
            persistent(tcp("fd00::1", 2), "rr", 60, 64),
            persistent(tcp("fd00::1", 3), "rr", 60, 1),
        ];
        add(client, &servers);
        assert_eq!(listed(client), servers);
        assert_eq!(
            saved(),
            "-A -t 10.0.0.1:1 -s rr -p 10800\n\
             -A -t 10.0.0.1:2 -s rr -p 60 -M 255.255.255.0\n\
             -A -t 10.0.0.1:3 -s rr -p 60 -M 0.0.0.0\n\
             -A -t 10.0.0.2:0 -s rr -p 60\n\
             -A -t [fd00::1]:1 -s rr -p 10800\n\
             -A -t [fd00::1]:2 -s rr -p 60 -M 64\n\
             -A -t [fd00::1]:3 -s rr -p 60 -M 1\n"
        );
        for (key, prefix) in [
            (tcp("10.0.0.9", 1), 33),
            (tcp("fd00::9", 1), 0),
            (tcp("fd00::9", 1), 129),
        ] {
            let wrong = persistent(key, "rr", 60, prefix);
            let result = apply_one(client, Request::AddVirtualServer(&wrong));
            assert!(matches!(
                result,
                Err(Error::Unsendable {
                    source: Unsendable::Prefix,
                    ..
                })
            ));
        }
    });
}

#[test]
fn one_packet_scheduling_and_the_sip_engine() {
    with_client(|client| {
        let servers = [
            VirtualServer {
                one_packet: true,
                ..server(udp("10.0.0.1", 53), "rr")
            },
            VirtualServer {
                persistence_engine: Some("sip".to_owned()),
                ..persistent(udp("10.0.0.1", 5060), "rr", 60, 32)
            },
            VirtualServer {
                one_packet: true,
                scheduler_flags: SchedulerFlags::PORT,
                persistence_engine: Some("sip".to_owned()),
                ..persistent(udp("10.0.0.1", 5061), "sh", 60, 24)
            },
        ];
        add(client, &servers);
        assert_eq!(listed(client), servers);
        assert_eq!(
            saved(),
            "-A -u 10.0.0.1:53 -s rr -o\n\
             -A -u 10.0.0.1:5060 -s rr -p 60 --pe sip\n\
             -A -u 10.0.0.1:5061 -s sh -p 60 -M 255.255.255.0 --pe sip -o -b sh-port\n"
        );
    });
}

#[test]
fn every_forwarding_method_and_threshold() {
    let tunnel = Forwarding::Tunnel;
    let gue = |port, checksum| tunnel(Tunnel::Gue { port, checksum });
    with_client(|client| {
        let v4 = server(tcp("10.0.0.1", 80), "wlc");
        let v6 = server(tcp("fd00::1", 80), "wlc");
        add(client, &[v4.clone(), v6.clone()]);
        let servers = [
            RealServer {
                upper_threshold: 1000,
                lower_threshold: 500,
                weight: 0x7fff_ffff,
                ..real("10.1.0.1", 8080, Forwarding::Masquerade)
            },
            RealServer {
                weight: 0,
                ..real("10.1.0.2", 80, Forwarding::DirectRoute)
            },
            real("10.1.0.3", 80, tunnel(Tunnel::IpIp)),
            real("10.1.0.4", 80, gue(6080, TunnelChecksum::None)),
            real("10.1.0.5", 80, gue(6080, TunnelChecksum::On)),
            real("10.1.0.6", 80, gue(6081, TunnelChecksum::Remote)),
            real(
                "10.1.0.7",
                80,
                tunnel(Tunnel::Gre {
                    checksum: TunnelChecksum::None,
                }),
            ),
            real(
                "10.1.0.8",
                80,
                tunnel(Tunnel::Gre {
                    checksum: TunnelChecksum::On,
                }),
            ),
            real("10.1.0.9", 80, Forwarding::Local),
            real("10.1.0.10", 80, Forwarding::Bypass),
            // The other family is for tunnels only.
            real("fd00:1::1", 80, tunnel(Tunnel::IpIp)),
        ];
        let requests: Vec<_> = servers
            .iter()
            .map(|real| Request::AddRealServer(v4.key, *real))
            .collect();
        apply_all(client, &requests);
        apply_all(
            client,
            &[
                Request::AddRealServer(v6.key, real("fd00:1::1", 8080, Forwarding::Masquerade)),
                Request::AddRealServer(v6.key, real("10.1.0.1", 80, tunnel(Tunnel::IpIp))),
            ],
        );
        assert_eq!(listed_real(client, v4.key), servers);
        assert_eq!(
            listed_real(client, v6.key),
            [
                real("10.1.0.1", 80, tunnel(Tunnel::IpIp)),
                real("fd00:1::1", 8080, Forwarding::Masquerade),
            ]
        );

        let shown = saved();
        for line in [
            "-a -t 10.0.0.1:80 -r 10.1.0.1:8080 -m -w 2147483647",
            "-a -t 10.0.0.1:80 -r 10.1.0.2:80 -g -w 0",
            "-a -t 10.0.0.1:80 -r 10.1.0.3:80 -i -w 1 --tun-type ipip",
            "-a -t 10.0.0.1:80 -r 10.1.0.4:80 -i -w 1 --tun-type gue --tun-port 6080 --tun-nocsum",
            "-a -t 10.0.0.1:80 -r 10.1.0.5:80 -i -w 1 --tun-type gue --tun-port 6080 --tun-csum",
            "-a -t 10.0.0.1:80 -r 10.1.0.6:80 -i -w 1 --tun-type gue --tun-port 6081 --tun-remcsum",
            "-a -t 10.0.0.1:80 -r 10.1.0.7:80 -i -w 1 --tun-type gre --tun-nocsum",
            "-a -t 10.0.0.1:80 -r 10.1.0.8:80 -i -w 1 --tun-type gre --tun-csum",
            "-a -t 10.0.0.1:80 -r [fd00:1::1]:80 -i -w 1 --tun-type ipip",
            "-a -t [fd00::1]:80 -r [fd00:1::1]:8080 -m -w 1",
            "-a -t [fd00::1]:80 -r 10.1.0.1:80 -i -w 1 --tun-type ipip",
        ] {
            assert!(shown.lines().any(|shown| shown == line), "{line}\n{shown}");
        }
        let thresholds = ipvsadm("-L -n --thresholds");
        let line = thresholds
            .lines()
            .find(|line| line.contains("10.1.0.1:8080"))
            .unwrap();
        assert!(line.contains(" 1000       500 "), "{line}");
    });
}

#[test]
fn firewall_marks_of_both_families() {
    with_client(|client| {
        let servers = [
            server(mark(7, Family::V4), "rr"),
            persistent(mark(7, Family::V6), "sh", 60, 64),
            server(mark(0x7fff_ffff, Family::V4), "rr"),
            server(mark(0xffff_ffff, Family::V4), "rr"),
        ];
        add(client, &servers);
        let first = real("10.1.0.1", 0, Forwarding::Masquerade);
        let second = real("fd00:1::1", 0, Forwarding::DirectRoute);
        apply_all(
            client,
            &[
                Request::AddRealServer(servers[0].key, first),
                Request::AddRealServer(servers[1].key, second),
            ],
        );
        assert_eq!(listed(client), servers);
        assert_eq!(listed_real(client, servers[0].key), [first]);
        assert_eq!(listed_real(client, servers[1].key), [second]);
        let shown = saved();
        for line in [
            "-A -f 7 -s rr",
            "-a -f 7 -r 10.1.0.1:0 -m -w 1",
            "-A -f 7 -6 -s sh -p 60 -M 64",
            "-a -f 7 -6 -r [fd00:1::1]:0 -g -w 1",
            "-A -f 2147483647 -s rr",
        ] {
            assert!(shown.lines().any(|shown| shown == line), "{line}\n{shown}");
        }
        let none = apply_one(client, Request::RemoveVirtualServer(mark(0, Family::V4)));
        assert!(matches!(
            none,
            Err(Error::Unsendable {
                source: Unsendable::MarkZero,
                ..
            })
        ));
        let requests: Vec<_> = servers
            .iter()
            .map(|server| Request::RemoveVirtualServer(server.key))
            .collect();
        apply_all(client, &requests);
        assert_eq!(saved(), "");
    });
}

#[test]
fn updates_leave_nothing_of_the_old_settings() {
    with_client(|client| {
        let key = udp("10.0.0.1", 80);
        let old = VirtualServer {
            one_packet: true,
            scheduler_flags: SchedulerFlags::from_bits(7),
            persistence_engine: Some("sip".to_owned()),
            ..persistent(key, "sh", 60, 24)
        };
        add(client, std::slice::from_ref(&old));
        let dest = real(
            "10.1.0.1",
            80,
            Forwarding::Tunnel(Tunnel::Gue {
                port: 6080,
                checksum: TunnelChecksum::On,
            }),
        );
        apply_all(client, &[Request::AddRealServer(key, dest)]);

        let new = server(key, "wlc");
        let moved = RealServer {
            weight: 7,
            upper_threshold: 9,
            lower_threshold: 3,
            ..real("10.1.0.1", 80, Forwarding::Masquerade)
        };
        apply_all(
            client,
            &[
                Request::UpdateVirtualServer(&new),
                Request::UpdateRealServer(key, moved),
            ],
        );
        assert_eq!(listed(client), std::slice::from_ref(&new));
        assert_eq!(client.virtual_server(key).unwrap().unwrap().server, new);
        assert_eq!(listed_real(client, key), [moved]);
        assert_eq!(
            saved(),
            "-A -u 10.0.0.1:80 -s wlc\n-a -u 10.0.0.1:80 -r 10.1.0.1:80 -m -w 7\n"
        );
        apply_all(
            client,
            &[
                Request::UpdateVirtualServer(&old),
                Request::UpdateRealServer(key, dest),
            ],
        );
        assert_eq!(listed(client), [old]);
        assert_eq!(listed_real(client, key), [dest]);
    });
}

/// A table as `ipvsadm -Sn` prints it.
const TABLE: &str = "\
-A -t 10.0.0.1:80 -s wlc
-a -t 10.0.0.1:80 -r 10.1.0.1:8080 -m -w 100
-a -t 10.0.0.1:80 -r 10.1.0.2:80 -i -w 1 --tun-type gue --tun-port 6080 --tun-csum
-a -t 10.0.0.1:80 -r 10.1.0.3:80 -i -w 1 --tun-type gre --tun-nocsum
-a -t 10.0.0.1:80 -r 10.1.0.4:80 -i -w 0 --tun-type ipip
-a -t 10.0.0.1:80 -r 10.1.0.5:80 -g -w 1
-a -t 10.0.0.1:80 -r [2001:db8::99]:80 -i -w 1 --tun-type ipip
-A -t 10.0.0.1:443 -s wrr -p 10800 -M 255.255.255.0
-A -t 10.0.0.2:0 -s mh -p 60 -b mh-fallback,mh-port
-A -u 10.0.0.1:53 -s rr -o
-A -u 10.0.0.1:5060 -s sh -p 60 --pe sip -b sh-fallback
-A --sctp-service 10.0.0.1:3868 -s lc
-a --sctp-service 10.0.0.1:3868 -r 10.1.0.1:3868 -m -w 1
-A -t [fd00::1]:80 -s nq
-a -t [fd00::1]:80 -r [fd00:1::1]:8080 -m -w 1
-A -u [fd00::1]:53 -s rr -p 300 -M 64
-A -f 100 -s rr
-a -f 100 -r 10.1.0.4:0 -g -w 1
-A -f 101 -6 -s sed -p 60
-a -f 101 -6 -r [2001:db8::5]:0 -i -w 1 --tun-type ipip
";

#[test]
fn what_ipvsadm_wrote_is_read_and_written_back() {
    with_client(|client| {
        ipvsadm_with_input("-R", TABLE);
        ipvsadm("-e -t 10.0.0.1:80 -r 10.1.0.1:8080 -m -w 100 -x 1000 -y 500");
        assert_eq!(saved(), TABLE);
        let thresholds = ipvsadm("-L -n --thresholds");
        let servers = listed(client);
        let real_servers: Vec<_> = servers
            .iter()
            .map(|server| (server.key, listed_real(client, server.key)))
            .collect();

        client.flush().unwrap();
        assert_eq!(saved(), "");

        let mut requests: Vec<_> = servers.iter().map(Request::AddVirtualServer).collect();
        for (key, real_servers) in &real_servers {
            let add = |real: &RealServer| Request::AddRealServer(*key, *real);
            requests.extend(real_servers.iter().map(add));
        }
        apply_all(client, &requests);
        assert_eq!(saved(), TABLE);
        assert_eq!(ipvsadm("-L -n --thresholds"), thresholds);
    });
}

#[test]
fn every_refusal_has_its_error() {
    with_client(|client| {
        let there = server(tcp("10.0.0.1", 80), "rr");
        let absent = server(tcp("10.0.0.2", 80), "rr");
        let dest = real("10.1.0.1", 80, Forwarding::Masquerade);
        let other = real("10.1.0.2", 80, Forwarding::Masquerade);
        let v6 = real("fd00:1::1", 80, Forwarding::Masquerade);
        let crossed = RealServer {
            upper_threshold: 1,
            lower_threshold: 2,
            ..other
        };
        let heavy = RealServer {
            weight: 0x8000_0000,
            ..other
        };
        let multicast = real("224.0.0.1", 80, Forwarding::Masquerade);
        let gue = real(
            "10.1.0.3",
            80,
            Forwarding::Tunnel(Tunnel::Gue {
                port: 0,
                checksum: TunnelChecksum::None,
            }),
        );
        let requests = [
            Request::AddVirtualServer(&there),
            Request::AddRealServer(there.key, dest),
            Request::AddVirtualServer(&there),
            Request::AddRealServer(there.key, dest),
            Request::UpdateVirtualServer(&absent),
            Request::RemoveVirtualServer(absent.key),
            Request::AddRealServer(absent.key, dest),
            Request::UpdateRealServer(absent.key, dest),
            Request::RemoveRealServer(absent.key, dest.key),
            Request::UpdateRealServer(there.key, other),
            Request::RemoveRealServer(there.key, other.key),
            Request::AddRealServer(there.key, v6),
            Request::AddRealServer(there.key, crossed),
            Request::AddRealServer(there.key, heavy),
            Request::AddRealServer(there.key, multicast),
            Request::AddRealServer(there.key, gue),
            Request::RemoveRealServer(there.key, dest.key),
        ];
        let seen: Vec<_> = client
            .apply(&requests)
            .into_iter()
            .map(|result| {
                let Err(error) = result else {
                    return "ok".to_owned();
                };
                let kind = match error {
                    Error::Exists { .. } => "exists",
                    Error::NoVirtualServer { .. } => "no virtual server",
                    Error::NoRealServer { .. } => "no real server",
                    Error::Kernel { .. } => "kernel",
                    ref other => panic!("{other:?}"),
                };
                format!("{kind} {}", error.errno_name().unwrap())
            })
            .collect();
        assert_eq!(
            seen,
            [
                "ok",
                "ok",
                "exists EEXIST",
                "exists EEXIST",
                "no virtual server ESRCH",
                "no virtual server ESRCH",
                "no virtual server ESRCH",
                "no virtual server ESRCH",
                "no virtual server ESRCH",
                "no real server ENOENT",
                "no real server ENOENT",
                "kernel EINVAL",
                "kernel ERANGE",
                "kernel ERANGE",
                "kernel EINVAL",
                "kernel EINVAL",
                "ok",
            ]
        );
        let error = apply_one(client, Request::AddVirtualServer(&there)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "add virtual server 10.0.0.1:80/tcp (rr): exists already (EEXIST)"
        );
        let error = apply_one(client, Request::AddRealServer(there.key, crossed)).unwrap_err();
        assert!(
            error.to_string().contains("lower_threshold: 2")
                && error
                    .to_string()
                    .ends_with("ERANGE: Math result not representable"),
            "{error}"
        );

        assert_eq!(client.virtual_server(absent.key), Ok(None));
        assert_eq!(client.real_servers(absent.key), Ok(Vec::new()));
        assert!(matches!(
            client.zero(Some(absent.key)),
            Err(Error::NoVirtualServer { .. })
        ));
    });
}

/// Waits until `condition` holds; the kernel adds up counters every two seconds.
fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not come");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn counters_count_and_are_zeroed() {
    with_client(|client| {
        let key = udp("127.0.0.2", 5000);
        let receiver = UdpSocket::bind("127.0.0.1:5001").unwrap();
        receiver
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        let dest = real("127.0.0.1", 5001, Forwarding::Masquerade);
        let virtual_server = server(key, "rr");
        apply_all(
            client,
            &[
                Request::AddVirtualServer(&virtual_server),
                Request::AddRealServer(key, dest),
            ],
        );
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        for _ in 0..3 {
            sender.send_to(b"0123456789", "127.0.0.2:5000").unwrap();
            let mut buffer = [0; 16];
            assert_eq!(receiver.recv(&mut buffer).unwrap(), 10);
        }

        // 10 bytes behind 8 of UDP and 20 of IP.
        let counted =
            |stats: Stats| (stats.connections, stats.packets_in, stats.bytes_in) == (1, 3, 3 * 38);
        wait_for("the virtual server's count", || {
            counted(client.virtual_servers().unwrap()[0].stats)
        });
        wait_for("the real server's count", || {
            counted(client.real_servers(key).unwrap()[0].stats)
        });
        let entry = &client.real_servers(key).unwrap()[0];
        assert_eq!(
            (entry.active_connections, entry.inactive_connections),
            (0, 1)
        );
        let shown = ipvsadm("-L -n --stats --exact");
        assert!(shown.contains(" 1 "), "{shown}");

        client.zero(Some(key)).unwrap();
        assert_eq!(client.virtual_servers().unwrap()[0].stats.packets_in, 0);
        assert_eq!(client.real_servers(key).unwrap()[0].stats.packets_in, 0);
        client.zero(None).unwrap();

        // A connection that goes on keeps its real server through an update.
        let drained = RealServer { weight: 0, ..dest };
        apply_all(client, &[Request::UpdateRealServer(key, drained)]);
        sender.send_to(b"again", "127.0.0.2:5000").unwrap();
        assert_eq!(receiver.recv(&mut [0; 16]).unwrap(), 5);
    });
}

#[test]
fn timeouts_and_version_are_those_of_ipvsadm() {
    with_client(|client| {
        let seconds = Duration::from_secs;
        let set = Timeouts {
            tcp: seconds(901),
            tcp_fin: seconds(121),
            udp: Duration::from_millis(301_500),
        };
        client.set_timeouts(&set).unwrap();
        assert_eq!(
            client.timeouts().unwrap(),
            Timeouts {
                udp: seconds(302),
                ..set
            }
        );
        assert_eq!(
            ipvsadm("-L --timeout").trim_end(),
            "Timeout (tcp tcpfin udp): 901 121 302"
        );
        let keep = Timeouts {
            tcp: seconds(0),
            tcp_fin: seconds(5),
            udp: seconds(0),
        };
        client.set_timeouts(&keep).unwrap();
        assert_eq!(client.timeouts().unwrap().tcp, seconds(901));
        assert_eq!(client.timeouts().unwrap().tcp_fin, seconds(5));

        let far = Timeouts {
            tcp: seconds(u32::MAX.into()),
            ..set
        };
        assert!(matches!(
            client.set_timeouts(&far),
            Err(Error::Kernel { .. })
        ));
        let further = Timeouts {
            tcp: Duration::MAX,
            ..set
        };
        assert!(matches!(
            client.set_timeouts(&further),
            Err(Error::Unsendable {
                source: Unsendable::Timeout,
                ..
            })
        ));

        let info = client.info().unwrap();
        assert_eq!(info.version, 0x0001_0201);
        let size = format!("(size={})", info.connection_table_size);
        assert!(ipvsadm("-L -n").contains(&size), "{size}");
    });
}

#[test]
fn long_batches_and_long_lists() {
    with_client(|client| {
        let servers: Vec<_> = (0..2000u16)
            .map(|i| {
                let [high, low] = i.to_be_bytes();
                server(tcp(&format!("10.9.{high}.{low}"), 80), "rr")
            })
            .collect();
        let of = servers[0].key;
        let real_servers: Vec<_> = (0..2000)
            .map(|i| real("10.1.0.1", 1000 + i, Forwarding::Masquerade))
            .collect();
        let mut requests: Vec<_> = servers.iter().map(Request::AddVirtualServer).collect();
        let add = |real: &RealServer| Request::AddRealServer(of, *real);
        requests.extend(real_servers.iter().map(add));
        apply_all(client, &requests);
        assert_eq!(listed(client), servers);
        assert_eq!(listed_real(client, of), real_servers);

        let requests: Vec<_> = servers
            .iter()
            .map(|server| Request::RemoveVirtualServer(server.key))
            .collect();
        apply_all(client, &requests);
        assert_eq!(listed(client), []);
    });
}

#[test]
fn names_of_schedulers_are_complete() {
    let known: Vec<_> = Scheduler::names().collect();
    assert!(SCHEDULERS.iter().all(|name| known.contains(name)));
}
