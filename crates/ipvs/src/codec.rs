//! Between the types of this crate and the attributes of `<linux/ip_vs.h>`.
//!
//! The numbers of the kernel and its byte orders appear here and nowhere else: addresses and ports
//! are big-endian on the wire, an IPv4 netmask is an address, all else is in the machine's order.
//! The module is public so that tests and tools can look at the bytes; [`Client`] is what to use
//! otherwise.
//!
//! [`Client`]: crate::Client

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use ipvs_proxy_netlink::{
    Attribute, Attributes, Error as NetlinkError, Family, Protocol, Request as Message, attributes,
};

use crate::client::Request;
use crate::types::{
    Forwarding, Info, Persistence, PersistenceMask, RealServer, RealServerEntry, RealServerKey,
    Scheduler, SchedulerFlags, Stats, SyncDaemon, SyncRole, Timeouts, Tunnel, TunnelChecksum,
    VirtualServer, VirtualServerEntry, VirtualServerKey,
};

/// The name of the generic netlink family.
pub const IPVS_GENL_NAME: &str = "IPVS"; // <linux/ip_vs.h>
const IPVS_GENL_VERSION: u8 = 1; // <linux/ip_vs.h>
const GENL_HDRLEN: usize = 4; // <linux/genetlink.h>

const IPVS_CMD_NEW_SERVICE: u8 = 1; // <linux/ip_vs.h>
const IPVS_CMD_SET_SERVICE: u8 = 2; // <linux/ip_vs.h>
const IPVS_CMD_DEL_SERVICE: u8 = 3; // <linux/ip_vs.h>
const IPVS_CMD_GET_SERVICE: u8 = 4; // <linux/ip_vs.h>
const IPVS_CMD_NEW_DEST: u8 = 5; // <linux/ip_vs.h>
const IPVS_CMD_SET_DEST: u8 = 6; // <linux/ip_vs.h>
const IPVS_CMD_DEL_DEST: u8 = 7; // <linux/ip_vs.h>
const IPVS_CMD_GET_DEST: u8 = 8; // <linux/ip_vs.h>
const IPVS_CMD_GET_DAEMON: u8 = 11; // <linux/ip_vs.h>
const IPVS_CMD_SET_CONFIG: u8 = 12; // <linux/ip_vs.h>
const IPVS_CMD_GET_CONFIG: u8 = 13; // <linux/ip_vs.h>
const IPVS_CMD_GET_INFO: u8 = 15; // <linux/ip_vs.h>
const IPVS_CMD_ZERO: u8 = 16; // <linux/ip_vs.h>
const IPVS_CMD_FLUSH: u8 = 17; // <linux/ip_vs.h>

const IPVS_CMD_ATTR_SERVICE: u16 = 1; // <linux/ip_vs.h>
const IPVS_CMD_ATTR_DEST: u16 = 2; // <linux/ip_vs.h>
const IPVS_CMD_ATTR_DAEMON: u16 = 3; // <linux/ip_vs.h>
const IPVS_CMD_ATTR_TIMEOUT_TCP: u16 = 4; // <linux/ip_vs.h>
const IPVS_CMD_ATTR_TIMEOUT_TCP_FIN: u16 = 5; // <linux/ip_vs.h>
const IPVS_CMD_ATTR_TIMEOUT_UDP: u16 = 6; // <linux/ip_vs.h>

const IPVS_SVC_ATTR_AF: u16 = 1; // <linux/ip_vs.h>
const IPVS_SVC_ATTR_PROTOCOL: u16 = 2; // <linux/ip_vs.h>
const IPVS_SVC_ATTR_ADDR: u16 = 3; // <linux/ip_vs.h>
const IPVS_SVC_ATTR_PORT: u16 = 4; // <linux/ip_vs.h>
const IPVS_SVC_ATTR_FWMARK: u16 = 5; // <linux/ip_vs.h>
const IPVS_SVC_ATTR_SCHED_NAME: u16 = 6; // <linux/ip_vs.h>
const IPVS_SVC_ATTR_FLAGS: u16 = 7; // <linux/ip_vs.h>
const IPVS_SVC_ATTR_TIMEOUT: u16 = 8; // <linux/ip_vs.h>
const IPVS_SVC_ATTR_NETMASK: u16 = 9; // <linux/ip_vs.h>
const IPVS_SVC_ATTR_STATS: u16 = 10; // <linux/ip_vs.h>
const IPVS_SVC_ATTR_PE_NAME: u16 = 11; // <linux/ip_vs.h>
const IPVS_SVC_ATTR_STATS64: u16 = 12; // <linux/ip_vs.h>

const IPVS_DEST_ATTR_ADDR: u16 = 1; // <linux/ip_vs.h>
const IPVS_DEST_ATTR_PORT: u16 = 2; // <linux/ip_vs.h>
const IPVS_DEST_ATTR_FWD_METHOD: u16 = 3; // <linux/ip_vs.h>
const IPVS_DEST_ATTR_WEIGHT: u16 = 4; // <linux/ip_vs.h>
const IPVS_DEST_ATTR_U_THRESH: u16 = 5; // <linux/ip_vs.h>
const IPVS_DEST_ATTR_L_THRESH: u16 = 6; // <linux/ip_vs.h>
const IPVS_DEST_ATTR_ACTIVE_CONNS: u16 = 7; // <linux/ip_vs.h>
const IPVS_DEST_ATTR_INACT_CONNS: u16 = 8; // <linux/ip_vs.h>
const IPVS_DEST_ATTR_PERSIST_CONNS: u16 = 9; // <linux/ip_vs.h>
const IPVS_DEST_ATTR_STATS: u16 = 10; // <linux/ip_vs.h>
const IPVS_DEST_ATTR_ADDR_FAMILY: u16 = 11; // <linux/ip_vs.h>
const IPVS_DEST_ATTR_STATS64: u16 = 12; // <linux/ip_vs.h>
const IPVS_DEST_ATTR_TUN_TYPE: u16 = 13; // <linux/ip_vs.h>
const IPVS_DEST_ATTR_TUN_PORT: u16 = 14; // <linux/ip_vs.h>
const IPVS_DEST_ATTR_TUN_FLAGS: u16 = 15; // <linux/ip_vs.h>

const IPVS_DAEMON_ATTR_STATE: u16 = 1; // <linux/ip_vs.h>
const IPVS_DAEMON_ATTR_MCAST_IFN: u16 = 2; // <linux/ip_vs.h>
const IPVS_DAEMON_ATTR_SYNC_ID: u16 = 3; // <linux/ip_vs.h>
const IPVS_DAEMON_ATTR_SYNC_MAXLEN: u16 = 4; // <linux/ip_vs.h>
const IPVS_DAEMON_ATTR_MCAST_GROUP: u16 = 5; // <linux/ip_vs.h>
const IPVS_DAEMON_ATTR_MCAST_GROUP6: u16 = 6; // <linux/ip_vs.h>
const IPVS_DAEMON_ATTR_MCAST_PORT: u16 = 7; // <linux/ip_vs.h>
const IPVS_DAEMON_ATTR_MCAST_TTL: u16 = 8; // <linux/ip_vs.h>

const IP_VS_STATE_MASTER: u32 = 1; // <linux/ip_vs.h>
const IP_VS_STATE_BACKUP: u32 = 2; // <linux/ip_vs.h>

const IPVS_STATS_ATTR_CONNS: u16 = 1; // <linux/ip_vs.h>
const IPVS_STATS_ATTR_INPKTS: u16 = 2; // <linux/ip_vs.h>
const IPVS_STATS_ATTR_OUTPKTS: u16 = 3; // <linux/ip_vs.h>
const IPVS_STATS_ATTR_INBYTES: u16 = 4; // <linux/ip_vs.h>
const IPVS_STATS_ATTR_OUTBYTES: u16 = 5; // <linux/ip_vs.h>
const IPVS_STATS_ATTR_CPS: u16 = 6; // <linux/ip_vs.h>
const IPVS_STATS_ATTR_INPPS: u16 = 7; // <linux/ip_vs.h>
const IPVS_STATS_ATTR_OUTPPS: u16 = 8; // <linux/ip_vs.h>
const IPVS_STATS_ATTR_INBPS: u16 = 9; // <linux/ip_vs.h>
const IPVS_STATS_ATTR_OUTBPS: u16 = 10; // <linux/ip_vs.h>

const IPVS_INFO_ATTR_VERSION: u16 = 1; // <linux/ip_vs.h>
const IPVS_INFO_ATTR_CONN_TAB_SIZE: u16 = 2; // <linux/ip_vs.h>

const IP_VS_SVC_F_PERSISTENT: u32 = 1; // <linux/ip_vs.h>
const IP_VS_SVC_F_ONEPACKET: u32 = 4; // <linux/ip_vs.h>
/// `IP_VS_SVC_F_SCHED1` (8), `SCHED2` and `SCHED3` are three bits in a row from this one on.
const SVC_F_SCHED_SHIFT: u32 = 3; // <linux/ip_vs.h>

const IP_VS_CONN_F_FWD_MASK: u32 = 7; // <linux/ip_vs.h>
const IP_VS_CONN_F_MASQ: u32 = 0; // <linux/ip_vs.h>
const IP_VS_CONN_F_LOCALNODE: u32 = 1; // <linux/ip_vs.h>
const IP_VS_CONN_F_TUNNEL: u32 = 2; // <linux/ip_vs.h>
const IP_VS_CONN_F_DROUTE: u32 = 3; // <linux/ip_vs.h>
const IP_VS_CONN_F_BYPASS: u32 = 4; // <linux/ip_vs.h>

const IP_VS_CONN_F_TUNNEL_TYPE_IPIP: u8 = 0; // <linux/ip_vs.h>
const IP_VS_CONN_F_TUNNEL_TYPE_GUE: u8 = 1; // <linux/ip_vs.h>
const IP_VS_CONN_F_TUNNEL_TYPE_GRE: u8 = 2; // <linux/ip_vs.h>

const IP_VS_TUNNEL_ENCAP_FLAG_NOCSUM: u16 = 0; // <linux/ip_vs.h>
const IP_VS_TUNNEL_ENCAP_FLAG_CSUM: u16 = 1; // <linux/ip_vs.h>
const IP_VS_TUNNEL_ENCAP_FLAG_REMCSUM: u16 = 2; // <linux/ip_vs.h>

/// Why a request has no form on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unsendable {
    /// Firewall mark 0 stands for "no mark": the kernel would take it for TCP to 0.0.0.0 port 0.
    #[error("a firewall mark can't be 0")]
    MarkZero,
    /// A persistence prefix is longer than an address of the family, or, for IPv6, 0 or no prefix.
    #[error("the persistence prefix is out of range")]
    Prefix,
    /// A persistence engine's name is empty, or longer than the 15 bytes that the kernel takes
    /// (`IP_VS_PENAME_MAXLEN` of `<linux/ip_vs.h>` with the closing NUL).
    #[error("the persistence engine's name is not of 1 to 15 bytes")]
    EngineName,
    /// A timeout has more seconds than 32 bits hold.
    #[error("the timeout is too long")]
    Timeout,
}

fn message(
    family: u16,
    command: u8,
    write: impl FnOnce(&mut Attributes) -> Result<(), Unsendable>,
) -> Result<Message, Unsendable> {
    let mut written = Ok(());
    let message = Message::generic(family, command, IPVS_GENL_VERSION, |attributes| {
        written = write(attributes);
    });
    written?;
    // The longest value is a name, whose length was checked.
    message.map_err(|_| Unsendable::EngineName)
}

/// The message that asks for one change. `family` is the kernel's number for [`IPVS_GENL_NAME`].
///
/// The form is that of ipvsadm: a virtual server comes with all its settings and a flags mask of
/// all ones, so that an update leaves nothing of the old settings behind.
pub fn change(family: u16, request: &Request<'_>) -> Result<Message, Unsendable> {
    let command = match request {
        Request::AddVirtualServer(_) => IPVS_CMD_NEW_SERVICE,
        Request::UpdateVirtualServer(_) => IPVS_CMD_SET_SERVICE,
        Request::RemoveVirtualServer(_) => IPVS_CMD_DEL_SERVICE,
        Request::AddRealServer(..) => IPVS_CMD_NEW_DEST,
        Request::UpdateRealServer(..) => IPVS_CMD_SET_DEST,
        Request::RemoveRealServer(..) => IPVS_CMD_DEL_DEST,
    };
    message(family, command, |a| match request {
        Request::AddVirtualServer(server) | Request::UpdateVirtualServer(server) => {
            write_virtual_server(a, server)
        }
        Request::RemoveVirtualServer(key) => write_virtual_server_key(a, key),
        Request::AddRealServer(of, server) | Request::UpdateRealServer(of, server) => {
            write_virtual_server_key(a, of)?;
            a.nested(IPVS_CMD_ATTR_DEST, |a| write_real_server(a, server));
            Ok(())
        }
        Request::RemoveRealServer(of, key) => {
            write_virtual_server_key(a, of)?;
            a.nested(IPVS_CMD_ATTR_DEST, |a| write_real_server_key(a, key));
            Ok(())
        }
    })
}

/// A message that asks for a virtual server that no kernel makes, and tells whether it has the
/// scheduler: `ip_vs_add_service` of net/netfilter/ipvs/ip_vs_ctl.c looks it up (and loads its
/// module) before it refuses the IPv6 prefix of 0.
pub fn probe_scheduler(family: u16, scheduler: &Scheduler) -> Result<Message, Unsendable> {
    message(family, IPVS_CMD_NEW_SERVICE, |a| {
        a.nested(IPVS_CMD_ATTR_SERVICE, |a| {
            let address = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
            let key = VirtualServerKey::Address {
                address: address.into(),
                port: 1,
                protocol: Protocol::Tcp,
            };
            write_key(a, &key);
            a.push_str(IPVS_SVC_ATTR_SCHED_NAME, scheduler.name());
            let flags = [0_u32.to_ne_bytes(), u32::MAX.to_ne_bytes()];
            a.push_bytes(IPVS_SVC_ATTR_FLAGS, flags.as_flattened());
            a.push_u32(IPVS_SVC_ATTR_TIMEOUT, 0);
            a.push_u32(IPVS_SVC_ATTR_NETMASK, 0);
        });
        Ok(())
    })
}

/// The message that asks for one virtual server, or as a dump for all.
pub fn get_virtual_server(
    family: u16,
    key: Option<&VirtualServerKey>,
) -> Result<Message, Unsendable> {
    message(family, IPVS_CMD_GET_SERVICE, |a| write_optional_key(a, key))
}

/// The dump that asks for the real servers of a virtual server.
pub fn get_real_servers(family: u16, of: &VirtualServerKey) -> Result<Message, Unsendable> {
    message(family, IPVS_CMD_GET_DEST, |a| {
        write_virtual_server_key(a, of)
    })
}

/// The message that sets the counters of one virtual server, or of all and the total, to zero.
pub fn zero(family: u16, key: Option<&VirtualServerKey>) -> Result<Message, Unsendable> {
    message(family, IPVS_CMD_ZERO, |a| write_optional_key(a, key))
}

/// The message that removes all virtual servers.
pub fn flush(family: u16) -> Result<Message, Unsendable> {
    message(family, IPVS_CMD_FLUSH, |_| Ok(()))
}

/// The message that asks for the timeouts of connections.
pub fn get_timeouts(family: u16) -> Result<Message, Unsendable> {
    message(family, IPVS_CMD_GET_CONFIG, |_| Ok(()))
}

/// The message that sets the timeouts of connections. The kernel counts whole seconds: the rest of
/// a second counts as one.
pub fn set_timeouts(family: u16, timeouts: &Timeouts) -> Result<Message, Unsendable> {
    let seconds = |time: Duration| {
        let whole = time
            .as_secs()
            .saturating_add(u64::from(time.subsec_nanos() > 0));
        u32::try_from(whole).map_err(|_| Unsendable::Timeout)
    };
    message(family, IPVS_CMD_SET_CONFIG, |a| {
        a.push_u32(IPVS_CMD_ATTR_TIMEOUT_TCP, seconds(timeouts.tcp)?);
        a.push_u32(IPVS_CMD_ATTR_TIMEOUT_TCP_FIN, seconds(timeouts.tcp_fin)?);
        a.push_u32(IPVS_CMD_ATTR_TIMEOUT_UDP, seconds(timeouts.udp)?);
        Ok(())
    })
}

/// The dump that asks for the synchronization daemons.
pub fn get_sync_daemons(family: u16) -> Result<Message, Unsendable> {
    message(family, IPVS_CMD_GET_DAEMON, |_| Ok(()))
}

/// The message that asks for IPVS's version and the size of its connection table.
pub fn get_info(family: u16) -> Result<Message, Unsendable> {
    message(family, IPVS_CMD_GET_INFO, |_| Ok(()))
}

fn write_optional_key(
    a: &mut Attributes,
    key: Option<&VirtualServerKey>,
) -> Result<(), Unsendable> {
    key.map_or(Ok(()), |key| write_virtual_server_key(a, key))
}

fn write_virtual_server_key(a: &mut Attributes, key: &VirtualServerKey) -> Result<(), Unsendable> {
    check_key(key)?;
    a.nested(IPVS_CMD_ATTR_SERVICE, |a| write_key(a, key));
    Ok(())
}

fn check_key(key: &VirtualServerKey) -> Result<(), Unsendable> {
    match key {
        VirtualServerKey::FirewallMark { mark: 0, .. } => Err(Unsendable::MarkZero),
        _ => Ok(()),
    }
}

fn write_key(a: &mut Attributes, key: &VirtualServerKey) {
    a.push_u16(IPVS_SVC_ATTR_AF, key.family().number().into());
    match key {
        VirtualServerKey::Address {
            address,
            port,
            protocol,
        } => {
            a.push_u16(IPVS_SVC_ATTR_PROTOCOL, protocol.number().into());
            push_address(a, IPVS_SVC_ATTR_ADDR, *address);
            a.push_u16_be(IPVS_SVC_ATTR_PORT, *port);
        }
        VirtualServerKey::FirewallMark { mark, .. } => a.push_u32(IPVS_SVC_ATTR_FWMARK, *mark),
    }
}

fn write_virtual_server(a: &mut Attributes, server: &VirtualServer) -> Result<(), Unsendable> {
    check_key(&server.key)?;
    let family = server.key.family();
    // Without persistence the netmask is that of a host, as ipvsadm sends it; for IPv6 the kernel
    // refuses 0.
    let every_client = PersistenceMask::Prefix(family.host_prefix());
    let mask = server.persistence.map_or(every_client, |p| p.mask);
    let netmask = netmask(family, mask).ok_or(Unsendable::Prefix)?;
    if let Some(name) = &server.persistence_engine
        && !(1..=15).contains(&name.len())
    {
        return Err(Unsendable::EngineName);
    }
    a.nested(IPVS_CMD_ATTR_SERVICE, |a| {
        write_key(a, &server.key);
        a.push_str(IPVS_SVC_ATTR_SCHED_NAME, server.scheduler.name());
        if let Some(name) = &server.persistence_engine {
            a.push_str(IPVS_SVC_ATTR_PE_NAME, name);
        }
        // struct ip_vs_flags: the flags, then the mask of those that count.
        let flags = [flags(server).to_ne_bytes(), u32::MAX.to_ne_bytes()];
        a.push_bytes(IPVS_SVC_ATTR_FLAGS, flags.as_flattened());
        a.push_u32(
            IPVS_SVC_ATTR_TIMEOUT,
            server.persistence.map_or(0, |p| p.timeout_s),
        );
        a.push_bytes(IPVS_SVC_ATTR_NETMASK, &netmask);
    });
    Ok(())
}

fn flags(server: &VirtualServer) -> u32 {
    let mut flags = u32::from(server.scheduler_flags.bits()) << SVC_F_SCHED_SHIFT;
    if server.persistence.is_some() {
        flags |= IP_VS_SVC_F_PERSISTENT;
    }
    if server.one_packet {
        flags |= IP_VS_SVC_F_ONEPACKET;
    }
    flags
}

/// One field with two forms: an IPv4 netmask as an address, an IPv6 prefix length as a number
/// (`ip_vs_add_service` of net/netfilter/ipvs/ip_vs_ctl.c).
fn netmask(family: Family, mask: PersistenceMask) -> Option<[u8; 4]> {
    match (family, mask) {
        (Family::V4, PersistenceMask::Prefix(prefix)) => {
            let host_bits = 32u32.checked_sub(prefix.into())?;
            Some(u32::MAX.checked_shl(host_bits).unwrap_or(0).to_be_bytes())
        }
        (Family::V4, PersistenceMask::Scattered(mask)) => Some(mask.octets()),
        (Family::V6, PersistenceMask::Prefix(prefix)) => (1..=128)
            .contains(&prefix)
            .then(|| u32::from(prefix).to_ne_bytes()),
        (Family::V6, PersistenceMask::Scattered(_)) => None,
    }
}

fn write_real_server_key(a: &mut Attributes, key: &RealServerKey) {
    a.push_u16(
        IPVS_DEST_ATTR_ADDR_FAMILY,
        Family::of(key.address).number().into(),
    );
    push_address(a, IPVS_DEST_ATTR_ADDR, key.address);
    a.push_u16_be(IPVS_DEST_ATTR_PORT, key.port);
}

fn write_real_server(a: &mut Attributes, server: &RealServer) {
    write_real_server_key(a, &server.key);
    let method = match server.forwarding {
        Forwarding::Masquerade => IP_VS_CONN_F_MASQ,
        Forwarding::Local => IP_VS_CONN_F_LOCALNODE,
        Forwarding::Tunnel(_) => IP_VS_CONN_F_TUNNEL,
        Forwarding::DirectRoute => IP_VS_CONN_F_DROUTE,
        Forwarding::Bypass => IP_VS_CONN_F_BYPASS,
    };
    a.push_u32(IPVS_DEST_ATTR_FWD_METHOD, method);
    a.push_u32(IPVS_DEST_ATTR_WEIGHT, server.weight);
    // IP in IP is what a kernel takes where these are left out, and all that old ones know.
    match server.forwarding {
        Forwarding::Tunnel(Tunnel::Gue { port, checksum }) => {
            write_tunnel(a, IP_VS_CONN_F_TUNNEL_TYPE_GUE, port, checksum);
        }
        Forwarding::Tunnel(Tunnel::Gre { checksum }) => {
            write_tunnel(a, IP_VS_CONN_F_TUNNEL_TYPE_GRE, 0, checksum);
        }
        _ => {}
    }
    a.push_u32(IPVS_DEST_ATTR_U_THRESH, server.upper_threshold);
    a.push_u32(IPVS_DEST_ATTR_L_THRESH, server.lower_threshold);
}

fn write_tunnel(a: &mut Attributes, kind: u8, port: u16, checksum: TunnelChecksum) {
    let flags = match checksum {
        TunnelChecksum::None => IP_VS_TUNNEL_ENCAP_FLAG_NOCSUM,
        TunnelChecksum::On => IP_VS_TUNNEL_ENCAP_FLAG_CSUM,
        TunnelChecksum::Remote => IP_VS_TUNNEL_ENCAP_FLAG_REMCSUM,
    };
    a.push_u8(IPVS_DEST_ATTR_TUN_TYPE, kind);
    a.push_u16_be(IPVS_DEST_ATTR_TUN_PORT, port);
    a.push_u16(IPVS_DEST_ATTR_TUN_FLAGS, flags);
}

/// `union nf_inet_addr`: 16 bytes for both families, IPv4 in the first four.
fn push_address(a: &mut Attributes, kind: u16, address: IpAddr) {
    match address {
        IpAddr::V4(v4) => a.push_bytes(kind, [v4.octets(), [0; 4], [0; 4], [0; 4]].as_flattened()),
        IpAddr::V6(v6) => a.push_bytes(kind, &v6.octets()),
    }
}

const MISSING: NetlinkError = NetlinkError::Decode("attribute missing");

/// The attributes of an answer, behind the generic netlink header.
fn body(payload: &[u8]) -> Result<Vec<Attribute<'_>>, NetlinkError> {
    let behind = payload
        .get(GENL_HDRLEN..)
        .ok_or(NetlinkError::Decode("answer cut short"))?;
    attributes(behind).collect()
}

/// The attributes nested in attribute `kind` of an answer.
fn body_of(payload: &[u8], kind: u16) -> Result<Vec<Attribute<'_>>, NetlinkError> {
    let outer = body(payload)?;
    let nested = outer.iter().find(|a| a.kind == kind).ok_or(MISSING)?;
    nested.nested().collect()
}

fn find<'a>(attributes: &[Attribute<'a>], kind: u16) -> Result<Attribute<'a>, NetlinkError> {
    attributes
        .iter()
        .find(|a| a.kind == kind)
        .copied()
        .ok_or(MISSING)
}

fn optional<'a>(attributes: &[Attribute<'a>], kind: u16) -> Option<Attribute<'a>> {
    attributes.iter().find(|a| a.kind == kind).copied()
}

/// The virtual server in an answer (`ip_vs_genl_fill_service` of
/// net/netfilter/ipvs/ip_vs_ctl.c); also reads what [`change()`] writes.
///
/// `payload` is what is behind the netlink header. Attributes and flags that this crate does not
/// know are skipped.
pub fn virtual_server(payload: &[u8]) -> Result<VirtualServerEntry, NetlinkError> {
    let a = body_of(payload, IPVS_CMD_ATTR_SERVICE)?;
    let flags = match find(&a, IPVS_SVC_ATTR_FLAGS)?.value.first_chunk::<4>() {
        Some(flags) => u32::from_ne_bytes(*flags),
        None => return Err(NetlinkError::Decode("flags cut short")),
    };
    let family = address_family(find(&a, IPVS_SVC_ATTR_AF)?.u16()?)?;
    let persistence = if flags & IP_VS_SVC_F_PERSISTENT == 0 {
        None
    } else {
        Some(Persistence {
            timeout_s: find(&a, IPVS_SVC_ATTR_TIMEOUT)?.u32()?,
            mask: mask(family, find(&a, IPVS_SVC_ATTR_NETMASK)?)?,
        })
    };
    let engine = optional(&a, IPVS_SVC_ATTR_PE_NAME)
        .map(|a| a.str())
        .transpose()?;
    let scheduler_flags = (flags >> SVC_F_SCHED_SHIFT) & 7;
    Ok(VirtualServerEntry {
        server: VirtualServer {
            key: virtual_server_key(&a, family)?,
            scheduler: scheduler(find(&a, IPVS_SVC_ATTR_SCHED_NAME)?)?,
            scheduler_flags: SchedulerFlags::from_bits(scheduler_flags.try_into().unwrap_or(0)),
            persistence,
            one_packet: flags & IP_VS_SVC_F_ONEPACKET != 0,
            persistence_engine: engine.filter(|name| !name.is_empty()).map(str::to_owned),
        },
        stats: stats(&a, IPVS_SVC_ATTR_STATS64, IPVS_SVC_ATTR_STATS)?,
    })
}

fn virtual_server_key(
    a: &[Attribute<'_>],
    family: Family,
) -> Result<VirtualServerKey, NetlinkError> {
    if let Some(mark) = optional(a, IPVS_SVC_ATTR_FWMARK) {
        return Ok(VirtualServerKey::FirewallMark {
            mark: mark.u32()?,
            family,
        });
    }
    let protocol = u8::try_from(find(a, IPVS_SVC_ATTR_PROTOCOL)?.u16()?)
        .map_err(|_| NetlinkError::Decode("protocol out of range"))?;
    Ok(VirtualServerKey::Address {
        address: address(family, find(a, IPVS_SVC_ATTR_ADDR)?)?,
        port: find(a, IPVS_SVC_ATTR_PORT)?.u16_be()?,
        protocol: Protocol::from_number(protocol),
    })
}

fn scheduler(name: Attribute<'_>) -> Result<Scheduler, NetlinkError> {
    name.str()?
        .parse()
        .map_err(|_| NetlinkError::Decode("impossible scheduler name"))
}

fn address_family(number: u16) -> Result<Family, NetlinkError> {
    u8::try_from(number)
        .ok()
        .and_then(Family::from_number)
        .ok_or(NetlinkError::Decode("unknown address family"))
}

/// `union nf_inet_addr`; an IPv4 address may also come alone.
fn address(family: Family, attribute: Attribute<'_>) -> Result<IpAddr, NetlinkError> {
    let read = match family {
        Family::V4 => attribute
            .value
            .first_chunk()
            .map(|a: &[u8; 4]| Ipv4Addr::from(*a).into()),
        Family::V6 => attribute
            .value
            .first_chunk()
            .map(|a: &[u8; 16]| Ipv6Addr::from(*a).into()),
    };
    read.ok_or(NetlinkError::Decode("address cut short"))
}

fn mask(family: Family, netmask: Attribute<'_>) -> Result<PersistenceMask, NetlinkError> {
    let prefix = match family {
        Family::V4 => {
            let mask = netmask.u32_be()?;
            if mask.leading_ones() != mask.count_ones() {
                return Ok(PersistenceMask::Scattered(mask.into()));
            }
            mask.leading_ones()
        }
        Family::V6 => netmask.u32()?,
    };
    u8::try_from(prefix)
        .ok()
        .filter(|prefix| *prefix <= family.host_prefix())
        .map(PersistenceMask::Prefix)
        .ok_or(NetlinkError::Decode("prefix out of range"))
}

/// The real server in an answer (`ip_vs_genl_fill_dest` of net/netfilter/ipvs/ip_vs_ctl.c); also
/// reads what [`change()`] writes.
///
/// Kernels before 3.18 send no address family of the real server; it is then `of`, that of the
/// virtual server.
pub fn real_server(payload: &[u8], of: Family) -> Result<RealServerEntry, NetlinkError> {
    let a = body_of(payload, IPVS_CMD_ATTR_DEST)?;
    let family = match optional(&a, IPVS_DEST_ATTR_ADDR_FAMILY) {
        Some(number) => address_family(number.u16()?)?,
        None => of,
    };
    let count = |kind| optional(&a, kind).map_or(Ok(0), |a| a.u32());
    Ok(RealServerEntry {
        server: RealServer {
            key: RealServerKey {
                address: address(family, find(&a, IPVS_DEST_ATTR_ADDR)?)?,
                port: find(&a, IPVS_DEST_ATTR_PORT)?.u16_be()?,
            },
            forwarding: forwarding(&a)?,
            weight: find(&a, IPVS_DEST_ATTR_WEIGHT)?.u32()?,
            upper_threshold: count(IPVS_DEST_ATTR_U_THRESH)?,
            lower_threshold: count(IPVS_DEST_ATTR_L_THRESH)?,
        },
        stats: stats(&a, IPVS_DEST_ATTR_STATS64, IPVS_DEST_ATTR_STATS)?,
        active_connections: count(IPVS_DEST_ATTR_ACTIVE_CONNS)?,
        inactive_connections: count(IPVS_DEST_ATTR_INACT_CONNS)?,
        persistent_connections: count(IPVS_DEST_ATTR_PERSIST_CONNS)?,
    })
}

fn forwarding(a: &[Attribute<'_>]) -> Result<Forwarding, NetlinkError> {
    match find(a, IPVS_DEST_ATTR_FWD_METHOD)?.u32()? & IP_VS_CONN_F_FWD_MASK {
        IP_VS_CONN_F_MASQ => Ok(Forwarding::Masquerade),
        IP_VS_CONN_F_LOCALNODE => Ok(Forwarding::Local),
        IP_VS_CONN_F_TUNNEL => tunnel(a).map(Forwarding::Tunnel),
        IP_VS_CONN_F_DROUTE => Ok(Forwarding::DirectRoute),
        IP_VS_CONN_F_BYPASS => Ok(Forwarding::Bypass),
        _ => Err(NetlinkError::Decode("unknown forwarding method")),
    }
}

fn tunnel(a: &[Attribute<'_>]) -> Result<Tunnel, NetlinkError> {
    let kind = optional(a, IPVS_DEST_ATTR_TUN_TYPE)
        .map_or(Ok(IP_VS_CONN_F_TUNNEL_TYPE_IPIP), |a| a.u8())?;
    let flags = optional(a, IPVS_DEST_ATTR_TUN_FLAGS).map_or(Ok(0), |a| a.u16())?;
    let checksum = if flags & IP_VS_TUNNEL_ENCAP_FLAG_REMCSUM != 0 {
        TunnelChecksum::Remote
    } else if flags & IP_VS_TUNNEL_ENCAP_FLAG_CSUM != 0 {
        TunnelChecksum::On
    } else {
        TunnelChecksum::None
    };
    match kind {
        IP_VS_CONN_F_TUNNEL_TYPE_IPIP => Ok(Tunnel::IpIp),
        IP_VS_CONN_F_TUNNEL_TYPE_GUE => Ok(Tunnel::Gue {
            port: find(a, IPVS_DEST_ATTR_TUN_PORT)?.u16_be()?,
            checksum,
        }),
        IP_VS_CONN_F_TUNNEL_TYPE_GRE => Ok(Tunnel::Gre { checksum }),
        _ => Err(NetlinkError::Decode("unknown tunnel type")),
    }
}

/// The counters; those of 64 bits where the kernel sends them (4.1 on). Of the others all but the
/// bytes have 32 bits.
fn stats(a: &[Attribute<'_>], wide: u16, narrow: u16) -> Result<Stats, NetlinkError> {
    let Some(nested) = optional(a, wide).or_else(|| optional(a, narrow)) else {
        return Ok(Stats::default());
    };
    let mut stats = Stats::default();
    for attribute in nested.nested() {
        let attribute = attribute?;
        let field = match attribute.kind {
            IPVS_STATS_ATTR_CONNS => &mut stats.connections,
            IPVS_STATS_ATTR_INPKTS => &mut stats.packets_in,
            IPVS_STATS_ATTR_OUTPKTS => &mut stats.packets_out,
            IPVS_STATS_ATTR_INBYTES => &mut stats.bytes_in,
            IPVS_STATS_ATTR_OUTBYTES => &mut stats.bytes_out,
            IPVS_STATS_ATTR_CPS => &mut stats.connections_per_s,
            IPVS_STATS_ATTR_INPPS => &mut stats.packets_in_per_s,
            IPVS_STATS_ATTR_OUTPPS => &mut stats.packets_out_per_s,
            IPVS_STATS_ATTR_INBPS => &mut stats.bytes_in_per_s,
            IPVS_STATS_ATTR_OUTBPS => &mut stats.bytes_out_per_s,
            _ => continue,
        };
        *field = match attribute.value.len() {
            4 => attribute.u32()?.into(),
            _ => attribute.u64()?,
        };
    }
    Ok(stats)
}

/// The timeouts in an answer; also reads what [`set_timeouts`] writes. Zero where the kernel was
/// built without the protocol.
pub fn timeouts(payload: &[u8]) -> Result<Timeouts, NetlinkError> {
    let a = body(payload)?;
    let time = |kind| {
        let seconds = optional(&a, kind).map_or(Ok(0), |a| a.u32());
        seconds.map(|seconds| Duration::from_secs(seconds.into()))
    };
    Ok(Timeouts {
        tcp: time(IPVS_CMD_ATTR_TIMEOUT_TCP)?,
        tcp_fin: time(IPVS_CMD_ATTR_TIMEOUT_TCP_FIN)?,
        udp: time(IPVS_CMD_ATTR_TIMEOUT_UDP)?,
    })
}

/// The synchronization daemon in an answer (`ip_vs_genl_fill_daemon` of
/// net/netfilter/ipvs/ip_vs_ctl.c).
pub fn sync_daemon(payload: &[u8]) -> Result<SyncDaemon, NetlinkError> {
    let a = body_of(payload, IPVS_CMD_ATTR_DAEMON)?;
    let role = match find(&a, IPVS_DAEMON_ATTR_STATE)?.u32()? {
        IP_VS_STATE_MASTER => SyncRole::Master,
        IP_VS_STATE_BACKUP => SyncRole::Backup,
        _ => return Err(NetlinkError::Decode("unknown state of a sync daemon")),
    };
    let group = match (
        optional(&a, IPVS_DAEMON_ATTR_MCAST_GROUP),
        optional(&a, IPVS_DAEMON_ATTR_MCAST_GROUP6),
    ) {
        (Some(group), _) => Some(address(Family::V4, group)?),
        (None, Some(group)) => Some(address(Family::V6, group)?),
        (None, None) => None,
    };
    let number = |kind| optional(&a, kind).map(|a| a.u16()).transpose();
    let ttl = optional(&a, IPVS_DAEMON_ATTR_MCAST_TTL);
    Ok(SyncDaemon {
        role,
        interface: find(&a, IPVS_DAEMON_ATTR_MCAST_IFN)?.str()?.to_owned(),
        id: find(&a, IPVS_DAEMON_ATTR_SYNC_ID)?.u32()?,
        longest_message: number(IPVS_DAEMON_ATTR_SYNC_MAXLEN)?,
        group,
        port: number(IPVS_DAEMON_ATTR_MCAST_PORT)?,
        ttl: ttl.map(|a| a.u8()).transpose()?,
    })
}

/// The version and table size in an answer.
pub fn info(payload: &[u8]) -> Result<Info, NetlinkError> {
    let a = body(payload)?;
    Ok(Info {
        version: find(&a, IPVS_INFO_ATTR_VERSION)?.u32()?,
        connection_table_size: find(&a, IPVS_INFO_ATTR_CONN_TAB_SIZE)?.u32()?,
    })
}
