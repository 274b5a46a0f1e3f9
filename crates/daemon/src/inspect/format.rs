//! The lines of `ipvsadm.c` 1.31 (`print_title`, `print_service_entry`, `print_largenum`).

use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr};

use ipvs_netlink::{
    Forwarding, PersistenceMask, RealServer, RealServerEntry, Scheduler, Stats, SyncDaemon,
    SyncRole, Timeouts, Tunnel, TunnelChecksum, VirtualServer, VirtualServerKey,
};
use ipvs_proxy_netlink::{Family, Protocol};

use super::args::{ListOptions, View};
use super::sort::{merge_sort, real_servers, virtual_servers};
use super::{Listed, Names, Saved};

/// What the first line of a listing says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The version word of the kernel's IPVS, `IPVS_INFO_ATTR_VERSION` of `<linux/ip_vs.h>`.
    pub version: u32,
    /// The number of hash buckets for connections, `IPVS_INFO_ATTR_CONN_TAB_SIZE`.
    pub table_size: u32,
}

/// ipvsadm's buffer for an address with its port, without the closing NUL.
const ADDRESS_BYTES: usize = 59;
/// What a listing shows of an IPv4 name.
const COLUMN: usize = 28;

/// `ipvsadm -L`. The table is in the kernel's order; without names everything is numeric.
#[must_use]
pub fn list(
    table: &[Listed],
    header: Header,
    options: &ListOptions,
    names: Option<&Names>,
) -> String {
    let mut out = String::new();
    if options.service.is_none() {
        let [_, major, minor, patch] = header.version.to_be_bytes();
        let size = header.table_size;
        put(
            &mut out,
            format_args!("IP Virtual Server version {major}.{minor}.{patch} (size={size})\n"),
        );
    }
    out.push_str(title(options.view));
    let mut table: Vec<&Listed> = table.iter().collect();
    if options.sort {
        table = merge_sort(table, |a, b| {
            virtual_servers(&a.0.server.key, &b.0.server.key)
        });
    }
    for (entry, reals) in table {
        put_virtual_server(&mut out, &entry.server, &entry.stats, options, names);
        let mut reals: Vec<&RealServerEntry> = reals.iter().collect();
        if options.sort {
            reals = merge_sort(reals, |a, b| real_servers(&a.server.key, &b.server.key));
        }
        for real in reals {
            put_real_server(&mut out, real, protocol(&entry.server.key), options, names);
        }
    }
    out
}

/// `ipvsadm -S`: the commands that make the table, without thresholds, which ipvsadm leaves out.
/// The table is in any order; without names everything is numeric.
#[must_use]
pub fn save(table: &[Saved], names: Option<&Names>) -> String {
    let mut out = String::new();
    let table: Vec<&Saved> = table.iter().collect();
    for (server, reals) in merge_sort(table, |a, b| virtual_servers(&a.0.key, &b.0.key)) {
        let key = service_option(&server.key, names);
        put(&mut out, format_args!("-A {key} -s {}", server.scheduler));
        if let Some(persistence) = server.persistence {
            put(&mut out, format_args!(" -p {}", persistence.timeout_s));
            if let Some(mask) = mask(server) {
                put(&mut out, format_args!(" -M {mask}"));
            }
        }
        if let Some(engine) = &server.persistence_engine {
            put(&mut out, format_args!(" --pe {engine}"));
        }
        if server.one_packet {
            out.push_str(" -o");
        }
        if let Some(flags) = flags(server) {
            put(&mut out, format_args!(" -b {flags}"));
        }
        out.push('\n');
        let reals: Vec<&RealServer> = reals.iter().collect();
        for real in merge_sort(reals, |a, b| real_servers(&a.key, &b.key)) {
            let address = address(
                real.key.address,
                real.key.port,
                protocol(&server.key),
                names,
            );
            let method = match real.forwarding {
                Forwarding::Masquerade => "-m",
                Forwarding::Tunnel(_) => "-i",
                Forwarding::DirectRoute => "-g",
                Forwarding::Local | Forwarding::Bypass => "",
            };
            let weight = real.weight;
            put(
                &mut out,
                format_args!("-a {key} -r {address} {method} -w {weight}"),
            );
            if let Forwarding::Tunnel(tunnel) = real.forwarding {
                put_tunnel(&mut out, tunnel);
            }
            out.push('\n');
        }
    }
    out
}

/// `ipvsadm -L --timeout`.
#[must_use]
pub fn timeouts(timeouts: &Timeouts) -> String {
    let [tcp, tcp_fin, udp] =
        [timeouts.tcp, timeouts.tcp_fin, timeouts.udp].map(|time| time.as_secs());
    format!("Timeout (tcp tcpfin udp): {tcp} {tcp_fin} {udp}\n")
}

/// `ipvsadm -L --daemon`.
#[must_use]
pub fn daemons(daemons: &[SyncDaemon]) -> String {
    let mut daemons: Vec<&SyncDaemon> = daemons.iter().collect();
    daemons.sort_by_key(|daemon| daemon.role);
    let mut out = String::new();
    for daemon in daemons {
        let role = match daemon.role {
            SyncRole::Master => "master",
            SyncRole::Backup => "backup",
        };
        let (interface, id) = (&daemon.interface, daemon.id);
        put(
            &mut out,
            format_args!("{role} sync daemon (mcast={interface}, syncid={id}"),
        );
        if let Some(length) = daemon.longest_message {
            put(&mut out, format_args!(", maxlen={length}"));
        }
        if let Some(group) = daemon.group {
            put(&mut out, format_args!(", group={}", numeric(group)));
        }
        if let Some(port) = daemon.port {
            put(&mut out, format_args!(", port={port}"));
        }
        if let Some(ttl) = daemon.ttl {
            put(&mut out, format_args!(", ttl={ttl}"));
        }
        out.push_str(")\n");
    }
    out
}

fn put(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a String can't fail.
    let _ = out.write_fmt(text);
}

fn title(view: View) -> &'static str {
    match view {
        View::Plain => concat!(
            "Prot LocalAddress:Port Scheduler Flags\n",
            "  -> RemoteAddress:Port           Forward Weight ActiveConn InActConn\n"
        ),
        View::Tunnels => concat!(
            "Prot LocalAddress:Port Scheduler Flags\n",
            "  -> RemoteAddress:Port           Forward TunnelInfo    Weight ActiveConn InActConn\n"
        ),
        View::Stats => concat!(
            "Prot LocalAddress:Port               Conns   InPkts  OutPkts  InBytes OutBytes\n",
            "  -> RemoteAddress:Port\n"
        ),
        View::Rates => concat!(
            "Prot LocalAddress:Port                 CPS    InPPS   OutPPS    InBPS   OutBPS\n",
            "  -> RemoteAddress:Port\n"
        ),
        View::Thresholds => concat!(
            "Prot LocalAddress:Port            Uthreshold Lthreshold ActiveConn InActConn \n",
            "  -> RemoteAddress:Port\n"
        ),
        View::PersistentConnections => concat!(
            "Prot LocalAddress:Port            Weight    PersistConn ActiveConn InActConn \n",
            "  -> RemoteAddress:Port\n"
        ),
    }
}

fn put_virtual_server(
    out: &mut String,
    server: &VirtualServer,
    stats: &Stats,
    options: &ListOptions,
    names: Option<&Names>,
) {
    let name = match server.key {
        VirtualServerKey::Address {
            address: ip,
            port,
            protocol,
        } => {
            let word = protocol_word(protocol);
            format!("{word:<4} {}", cut(address(ip, port, protocol, names), ip))
        }
        VirtualServerKey::FirewallMark { mark, family } => {
            let family = if family == Family::V6 { " IPv6" } else { "" };
            format!("FWM  {}{family}", mark.cast_signed())
        }
    };
    if let Some(numbers) = numbers(options, stats) {
        put(out, format_args!("{name:<33}{numbers}\n"));
        return;
    }
    put(out, format_args!("{name} {}", server.scheduler));
    if let Some(flags) = flags(server) {
        put(out, format_args!(" ({flags})"));
    }
    if let Some(persistence) = server.persistence {
        put(out, format_args!(" persistent {}", persistence.timeout_s));
        if let Some(mask) = mask(server) {
            put(out, format_args!(" mask {mask}"));
        }
    }
    if let Some(engine) = &server.persistence_engine {
        put(out, format_args!(" pe {engine}"));
    }
    if server.one_packet {
        out.push_str(" ops");
    }
    out.push('\n');
}

fn put_real_server(
    out: &mut String,
    entry: &RealServerEntry,
    protocol: Protocol,
    options: &ListOptions,
    names: Option<&Names>,
) {
    let RealServer {
        key,
        forwarding,
        weight,
        upper_threshold,
        lower_threshold,
    } = entry.server;
    let address = cut(address(key.address, key.port, protocol, names), key.address);
    put(out, format_args!("  -> {address:<28}"));
    if let Some(numbers) = numbers(options, &entry.stats) {
        put(out, format_args!("{numbers}\n"));
        return;
    }
    match options.view {
        View::Thresholds => {
            put(
                out,
                format_args!(" {upper_threshold:<10} {lower_threshold:<10}"),
            );
        }
        View::PersistentConnections => {
            put(
                out,
                format_args!(" {weight:<9} {:<11}", entry.persistent_connections),
            );
        }
        View::Tunnels => {
            let (word, info) = (forwarding_word(forwarding), tunnel_info(forwarding));
            put(out, format_args!(" {word:<7} {info:<13} {weight:<6}"));
        }
        View::Plain | View::Stats | View::Rates => {
            put(
                out,
                format_args!(" {:<7} {weight:<6}", forwarding_word(forwarding)),
            );
        }
    }
    let (active, inactive) = (entry.active_connections, entry.inactive_connections);
    put(out, format_args!(" {active:<10} {inactive:<10}\n"));
}

/// The five numbers of the views that have numbers, each a blank and eight wide.
fn numbers(options: &ListOptions, s: &Stats) -> Option<String> {
    let numbers = match options.view {
        View::Stats => [
            s.connections,
            s.packets_in,
            s.packets_out,
            s.bytes_in,
            s.bytes_out,
        ],
        View::Rates => [
            s.connections_per_s,
            s.packets_in_per_s,
            s.packets_out_per_s,
            s.bytes_in_per_s,
            s.bytes_out_per_s,
        ],
        _ => return None,
    };
    let mut out = String::new();
    for number in numbers {
        let text = if options.exact {
            number.to_string()
        } else {
            short(number)
        };
        put(&mut out, format_args!(" {text:>8}"));
    }
    Some(out)
}

fn short(number: u64) -> String {
    match number {
        ..100_000_000 => number.to_string(),
        100_000_000..1_000_000_000 => format!("{}K", number / 1_000),
        1_000_000_000..100_000_000_000 => format!("{}M", number / 1_000_000),
        100_000_000_000..100_000_000_000_000 => format!("{}G", number / 1_000_000_000),
        _ => format!("{}T", number / 1_000_000_000_000),
    }
}

fn service_option(key: &VirtualServerKey, names: Option<&Names>) -> String {
    match *key {
        VirtualServerKey::Address {
            address: ip,
            port,
            protocol,
        } => {
            let option = match protocol {
                Protocol::Udp => "-u",
                Protocol::Sctp => "--sctp-service",
                Protocol::Tcp | Protocol::Other(_) => "-t",
            };
            format!("{option} {}", address(ip, port, protocol, names))
        }
        VirtualServerKey::FirewallMark { mark, family } => {
            let family = if family == Family::V6 { " -6" } else { "" };
            format!("-f {}{family}", mark.cast_signed())
        }
    }
}

fn protocol_word(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Udp => "UDP",
        Protocol::Sctp => "SCTP",
        Protocol::Tcp | Protocol::Other(_) => "TCP",
    }
}

fn protocol(key: &VirtualServerKey) -> Protocol {
    match *key {
        VirtualServerKey::Address { protocol, .. } => protocol,
        VirtualServerKey::FirewallMark { .. } => Protocol::Other(0),
    }
}

pub(super) fn address(ip: IpAddr, port: u16, protocol: Protocol, names: Option<&Names>) -> String {
    let host = names
        .and_then(|names| names.host(ip))
        .map_or_else(|| numeric(ip), str::to_owned);
    let port = names
        .and_then(|names| names.port(port, protocol))
        .map_or_else(|| port.to_string(), str::to_owned);
    let text = if ip.is_ipv6() {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    };
    shorten(text, ADDRESS_BYTES)
}

/// A listing cuts long IPv4 names to their column; IPv6 pushes the rest of the line.
fn cut(text: String, ip: IpAddr) -> String {
    if ip.is_ipv4() {
        shorten(text, COLUMN)
    } else {
        text
    }
}

fn shorten(mut text: String, bytes: usize) -> String {
    text.truncate(text.floor_char_boundary(bytes));
    text
}

/// As `inet_ntop(3)` writes it, which knows IPv4-compatible IPv6 addresses.
fn numeric(ip: IpAddr) -> String {
    match ip {
        IpAddr::V6(v6) => match v6.octets() {
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, d] if (a, b) != (0, 0) => {
                format!("::{}", Ipv4Addr::new(a, b, c, d))
            }
            _ => v6.to_string(),
        },
        IpAddr::V4(v4) => v4.to_string(),
    }
}

/// The flags of the scheduler, comma-joined; empty when it knows none of those that are set.
fn flags(server: &VirtualServer) -> Option<String> {
    let names = match server.scheduler {
        Scheduler::SourceHash => ["sh-fallback", "sh-port", ""],
        Scheduler::MaglevHash => ["mh-fallback", "mh-port", ""],
        _ => ["flag-1", "flag-2", "flag-3"],
    };
    let bits = server.scheduler_flags.bits();
    let set = names
        .into_iter()
        .enumerate()
        .filter(|(i, name)| bits >> i & 1 == 1 && !name.is_empty());
    (bits != 0).then(|| set.map(|(_, name)| name).collect::<Vec<_>>().join(","))
}

/// The mask of persistence, unless each address is a client of its own.
fn mask(server: &VirtualServer) -> Option<String> {
    let family = server.key.family();
    let prefix = match server.persistence?.mask {
        PersistenceMask::Prefix(prefix) if prefix >= family.host_prefix() => return None,
        PersistenceMask::Prefix(prefix) => prefix,
        PersistenceMask::Scattered(mask) => return Some(mask.to_string()),
    };
    Some(match family {
        Family::V4 => {
            let host_bits = u32::MAX.checked_shr(prefix.into()).unwrap_or(0);
            Ipv4Addr::from_bits(!host_bits).to_string()
        }
        Family::V6 => prefix.to_string(),
    })
}

fn forwarding_word(forwarding: Forwarding) -> &'static str {
    match forwarding {
        Forwarding::Masquerade => "Masq",
        Forwarding::Local => "Local",
        Forwarding::Tunnel(_) => "Tunnel",
        Forwarding::DirectRoute => "Route",
        Forwarding::Bypass => "Bypass",
    }
}

fn tunnel_info(forwarding: Forwarding) -> String {
    let sign = |checksum| match checksum {
        TunnelChecksum::None => "-c",
        TunnelChecksum::On => "+c",
        TunnelChecksum::Remote => "r+c",
    };
    match forwarding {
        Forwarding::Tunnel(Tunnel::IpIp) => "ipip".to_owned(),
        Forwarding::Tunnel(Tunnel::Gue { port, checksum }) => {
            format!("gue:{port}:{}", sign(checksum))
        }
        Forwarding::Tunnel(Tunnel::Gre { checksum }) => format!("gre:{}", sign(checksum)),
        _ => "n/a".to_owned(),
    }
}

fn put_tunnel(out: &mut String, tunnel: Tunnel) {
    let option = |checksum| match checksum {
        TunnelChecksum::None => "--tun-nocsum",
        TunnelChecksum::On => "--tun-csum",
        TunnelChecksum::Remote => "--tun-remcsum",
    };
    match tunnel {
        Tunnel::IpIp => out.push_str(" --tun-type ipip"),
        Tunnel::Gue { port, checksum } => {
            let checksum = option(checksum);
            put(
                out,
                format_args!(" --tun-type gue --tun-port {port} {checksum}"),
            );
        }
        Tunnel::Gre { checksum } => {
            put(out, format_args!(" --tun-type gre {}", option(checksum)));
        }
    }
}
