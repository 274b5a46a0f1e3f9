//! What IPVS holds: virtual servers and their real servers, as plain values.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use ipvs_proxy_netlink::{Family, Protocol};

/// What identifies a virtual server in the kernel's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum VirtualServerKey {
    /// A virtual server reached by address, port and protocol.
    Address {
        /// The VIP.
        address: IpAddr,
        /// The port; 0 stands for all ports and needs persistence.
        port: u16,
        /// The transport protocol.
        protocol: Protocol,
    },
    /// A virtual server reached by the packet's firewall mark.
    FirewallMark {
        /// The whole mark of the packet, never 0.
        mark: u32,
        /// The address family it serves.
        family: Family,
    },
}

impl VirtualServerKey {
    /// The address family of the clients.
    #[must_use]
    pub fn family(&self) -> Family {
        match self {
            VirtualServerKey::Address { address, .. } => Family::of(*address),
            VirtualServerKey::FirewallMark { family, .. } => *family,
        }
    }
}

/// `10.0.0.1:80/tcp`, `[fd00::1]:53/udp`, `fwmark 7 (IPv4)`.
impl fmt::Display for VirtualServerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VirtualServerKey::Address {
                address,
                port,
                protocol,
            } => write!(f, "{}/{protocol}", SocketAddr::new(*address, *port)),
            VirtualServerKey::FirewallMark { mark, family } => {
                let family = match family {
                    Family::V4 => "IPv4",
                    Family::V6 => "IPv6",
                };
                write!(f, "fwmark {mark} ({family})")
            }
        }
    }
}

/// A virtual server: `struct ip_vs_service_user` of `<linux/ip_vs.h>` without its counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualServer {
    /// What identifies it.
    pub key: VirtualServerKey,
    /// How a real server is chosen for a new connection.
    pub scheduler: Scheduler,
    /// The scheduler's own flags.
    pub scheduler_flags: SchedulerFlags,
    /// Keeps a client on one real server, when present.
    pub persistence: Option<Persistence>,
    /// One-packet scheduling (UDP): each datagram is scheduled anew, `IP_VS_SVC_F_ONEPACKET`.
    pub one_packet: bool,
    /// The persistence engine's name (`sip`), when one is set.
    pub persistence_engine: Option<String>,
}

/// Persistence of a virtual server, `IP_VS_SVC_F_PERSISTENT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Persistence {
    /// How long a client without connections stays with its real server, in seconds.
    pub timeout_s: u32,
    /// Which bits of the client's address tell clients apart.
    pub mask: PersistenceMask,
}

/// Which bits of a client's address tell clients apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PersistenceMask {
    /// The leading ones, this many: 32 or 128 for each address on its own.
    Prefix(u8),
    /// Those of an IPv4 mask that is no prefix (255.0.255.0).
    Scattered(Ipv4Addr),
}

/// The three flags that a scheduler may read, `IP_VS_SVC_F_SCHED1` to `IP_VS_SVC_F_SCHED3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SchedulerFlags(u8);

impl SchedulerFlags {
    /// No flag.
    pub const NONE: SchedulerFlags = SchedulerFlags(0);
    /// `IP_VS_SVC_F_SCHED1`: `sh-fallback` and `mh-fallback`, try another real server when the
    /// hashed one is not available.
    pub const FALLBACK: SchedulerFlags = SchedulerFlags(1);
    /// `IP_VS_SVC_F_SCHED2`: `sh-port` and `mh-port`, hash the source port too.
    pub const PORT: SchedulerFlags = SchedulerFlags(2);

    /// The flags whose bits 0, 1, 2 are set in `bits`; higher bits are dropped.
    #[must_use]
    pub fn from_bits(bits: u8) -> SchedulerFlags {
        SchedulerFlags(bits & 7)
    }

    /// Bit 0 for `SCHED1`, bit 1 for `SCHED2`, bit 2 for `SCHED3`.
    #[must_use]
    pub fn bits(self) -> u8 {
        self.0
    }

    /// Both sets of flags together.
    #[must_use]
    pub fn union(self, other: SchedulerFlags) -> SchedulerFlags {
        SchedulerFlags(self.0 | other.0)
    }
}

/// A scheduler of IPVS. The kernel loads module `ip_vs_NAME` when it is first used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scheduler {
    /// `rr`: round robin.
    RoundRobin,
    /// `wrr`: weighted round robin.
    WeightedRoundRobin,
    /// `lc`: least connections.
    LeastConnection,
    /// `wlc`: weighted least connections.
    WeightedLeastConnection,
    /// `lblc`: locality-based least connections.
    LocalityLeastConnection,
    /// `lblcr`: locality-based least connections with replication.
    LocalityLeastConnectionReplicated,
    /// `dh`: by destination address.
    DestinationHash,
    /// `sh`: by source address.
    SourceHash,
    /// `mh`: Maglev hashing of the source address.
    MaglevHash,
    /// `sed`: shortest expected delay.
    ShortestExpectedDelay,
    /// `nq`: never queue.
    NeverQueue,
    /// `fo`: the available real server of the highest weight.
    WeightedFailover,
    /// `ovf`: overflow to the next once a server has as many connections as its weight.
    WeightedOverflow,
    /// `twos`: the better of two random choices.
    PowerOfTwo,
    /// Any other scheduler that the kernel may know, by name.
    Other(SchedulerName),
}

/// A scheduler's name: 1 to 15 bytes (`IP_VS_SCHEDNAME_MAXLEN` of `<linux/ip_vs.h>` is 16 with
/// the closing NUL).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SchedulerName([u8; 16]);

impl SchedulerName {
    fn as_str(&self) -> &str {
        let length = self.0.iter().position(|b| *b == 0).unwrap_or(self.0.len());
        self.0
            .get(..length)
            .and_then(|name| std::str::from_utf8(name).ok())
            .unwrap_or("")
    }
}

impl fmt::Debug for SchedulerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// A scheduler's name that the kernel can't hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("scheduler {0:?} is not a name of 1 to 15 letters, digits, '-' or '_'")]
pub struct InvalidScheduler(pub String);

const NAMES: [(&str, Scheduler); 14] = [
    ("rr", Scheduler::RoundRobin),
    ("wrr", Scheduler::WeightedRoundRobin),
    ("lc", Scheduler::LeastConnection),
    ("wlc", Scheduler::WeightedLeastConnection),
    ("lblc", Scheduler::LocalityLeastConnection),
    ("lblcr", Scheduler::LocalityLeastConnectionReplicated),
    ("dh", Scheduler::DestinationHash),
    ("sh", Scheduler::SourceHash),
    ("mh", Scheduler::MaglevHash),
    ("sed", Scheduler::ShortestExpectedDelay),
    ("nq", Scheduler::NeverQueue),
    ("fo", Scheduler::WeightedFailover),
    ("ovf", Scheduler::WeightedOverflow),
    ("twos", Scheduler::PowerOfTwo),
];

impl Scheduler {
    /// The names of the schedulers of Linux, as `ipvsadm -s` takes them.
    pub fn names() -> impl Iterator<Item = &'static str> {
        NAMES.iter().map(|(name, _)| *name)
    }

    /// The name that the kernel knows it by.
    #[must_use]
    pub fn name(&self) -> &str {
        if let Scheduler::Other(name) = self {
            return name.as_str();
        }
        NAMES
            .iter()
            .find(|(_, s)| s == self)
            .map_or("", |(name, _)| name)
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Scheduler {
    type Err = InvalidScheduler;

    /// Takes any name that the kernel can hold; whether the kernel has it shows on first use.
    fn from_str(name: &str) -> Result<Scheduler, InvalidScheduler> {
        if let Some((_, scheduler)) = NAMES.iter().find(|(known, _)| *known == name) {
            return Ok(*scheduler);
        }
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        let mut bytes = [0; 16];
        match bytes.get_mut(..name.len()) {
            Some(start) if (1..=15).contains(&name.len()) && name.bytes().all(plain) => {
                start.copy_from_slice(name.as_bytes());
                Ok(Scheduler::Other(SchedulerName(bytes)))
            }
            _ => Err(InvalidScheduler(name.to_owned())),
        }
    }
}

/// What identifies a real server within its virtual server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RealServerKey {
    /// Its address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
}

/// `10.1.0.7:8080`, `[fd00::7]:8080`.
impl fmt::Display for RealServerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", SocketAddr::new(self.address, self.port))
    }
}

/// A real server: `struct ip_vs_dest_user` of `<linux/ip_vs.h>` without its counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RealServer {
    /// What identifies it.
    pub key: RealServerKey,
    /// How packets reach it.
    pub forwarding: Forwarding,
    /// Its weight; 0 takes no new connection (a drain).
    pub weight: u32,
    /// No new connection from this many on; 0 means no limit.
    pub upper_threshold: u32,
    /// New connections again from this many down.
    pub lower_threshold: u32,
}

/// How packets reach a real server, `IP_VS_CONN_F_FWD_MASK` of `<linux/ip_vs.h>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Forwarding {
    /// `IP_VS_CONN_F_MASQ` (0): address translation.
    Masquerade,
    /// `IP_VS_CONN_F_LOCALNODE` (1): the node itself.
    Local,
    /// `IP_VS_CONN_F_TUNNEL` (2): encapsulation.
    Tunnel(Tunnel),
    /// `IP_VS_CONN_F_DROUTE` (3): direct routing.
    DirectRoute,
    /// `IP_VS_CONN_F_BYPASS` (4): past the cache, to the original destination.
    Bypass,
}

/// How a tunnelled packet is wrapped, `IPVS_DEST_ATTR_TUN_TYPE` of `<linux/ip_vs.h>`
/// (since Linux 5.3; older kernels know only IP in IP).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tunnel {
    /// IP in IP.
    IpIp,
    /// Generic UDP encapsulation.
    Gue {
        /// The UDP port at the real server.
        port: u16,
        /// The checksum mode.
        checksum: TunnelChecksum,
    },
    /// Generic routing encapsulation.
    Gre {
        /// The checksum mode.
        checksum: TunnelChecksum,
    },
}

/// The checksum of the outer packet, `IP_VS_TUNNEL_ENCAP_FLAG_*` of `<linux/ip_vs.h>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TunnelChecksum {
    /// `--tun-nocsum`.
    None,
    /// `--tun-csum`.
    On,
    /// `--tun-remcsum`: remote checksum offload, GUE only.
    Remote,
}

/// 64-bit counters of a virtual or real server, `IPVS_SVC_ATTR_STATS64`; from the 32-bit ones on
/// kernels that send no others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Connections scheduled.
    pub connections: u64,
    /// Packets from clients.
    pub packets_in: u64,
    /// Packets to clients.
    pub packets_out: u64,
    /// Bytes from clients.
    pub bytes_in: u64,
    /// Bytes to clients.
    pub bytes_out: u64,
    /// Connections a second, as the kernel estimates it.
    pub connections_per_s: u64,
    /// Packets a second from clients.
    pub packets_in_per_s: u64,
    /// Packets a second to clients.
    pub packets_out_per_s: u64,
    /// Bytes a second from clients.
    pub bytes_in_per_s: u64,
    /// Bytes a second to clients.
    pub bytes_out_per_s: u64,
}

/// A virtual server as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualServerEntry {
    /// The virtual server.
    pub server: VirtualServer,
    /// Its counters.
    pub stats: Stats,
}

/// A real server as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RealServerEntry {
    /// The real server.
    pub server: RealServer,
    /// Its counters.
    pub stats: Stats,
    /// Connections that are established.
    pub active_connections: u32,
    /// Connections in any other state.
    pub inactive_connections: u32,
    /// Persistence templates that point to it.
    pub persistent_connections: u32,
}

/// How long IPVS keeps a connection without traffic, `struct ip_vs_timeout_user` of
/// `<linux/ip_vs.h>`; the kernel counts whole seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// A TCP connection that is established.
    pub tcp: Duration,
    /// A TCP connection that is closing.
    pub tcp_fin: Duration,
    /// A flow of UDP datagrams.
    pub udp: Duration,
}

/// A daemon that sends connections to other hosts, or receives them from others, `struct ip_vs_daemon_user` of
/// `<linux/ip_vs.h>`. Kernels before 4.3 tell no more than the first three.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyncDaemon {
    /// What it does.
    pub role: SyncRole,
    /// The name of the link whose multicast it uses.
    pub interface: String,
    /// What tells its messages from others in the group.
    pub id: u32,
    /// The most bytes that a message has.
    pub longest_message: Option<u16>,
    /// The multicast group.
    pub group: Option<IpAddr>,
    /// The UDP port.
    pub port: Option<u16>,
    /// The time to live of its packets.
    pub ttl: Option<u8>,
}

/// What a synchronization daemon does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SyncRole {
    /// `IP_VS_STATE_MASTER`: it sends.
    Master,
    /// `IP_VS_STATE_BACKUP`: it receives.
    Backup,
}

/// What IPVS says about itself, `struct ip_vs_getinfo` of `<linux/ip_vs.h>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Info {
    /// `IP_VS_VERSION_CODE`: 0x010201 for version 1.2.1.
    pub version: u32,
    /// Hash buckets in the connection table (module parameter `conn_tab_bits`).
    pub connection_table_size: u32,
}
