//! `ipvsadm -L -c`: the rows of `/proc/net/ip_vs_conn` (`ip_vs_conn_seq_show` of net/netfilter/ipvs/ip_vs_conn.c) as
//! `print_conn` of `ipvsadm.c` 1.31 shows them.

use std::collections::BTreeSet;
use std::io::{self, BufRead, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipvs_proxy_netlink::Protocol;

use super::Names;
use super::format::address;

/// A row of `/proc/net/ip_vs_conn`.
struct Connection<'a> {
    protocol: &'a str,
    client: (IpAddr, u16),
    vip: (IpAddr, u16),
    real_server: (IpAddr, u16),
    state: &'a str,
    expires_s: u64,
    /// The name of a persistence engine, and what it keeps of the connection.
    engine: Option<(&'a str, &'a str)>,
}

/// Writes the connections of a text in the form of `/proc/net/ip_vs_conn`, in its order. With `engines` also what
/// persistence engines keep; without names everything is numeric.
///
/// # Errors
///
/// What reading or writing comes to; [`io::ErrorKind::InvalidData`] with the row where one has another form.
pub fn connections(
    rows: impl BufRead,
    engines: bool,
    names: Option<&Names>,
    mut out: impl Write,
) -> io::Result<()> {
    out.write_all(b"IPVS connection entries\n")?;
    out.write_all(b"pro expire state       source             virtual            destination")?;
    if engines {
        out.write_all(b"        pe name          pe_data")?;
    }
    out.write_all(b"\n")?;
    for row in rows.lines().skip(1) {
        let row = row?;
        let connection = parse(&row).ok_or_else(|| unreadable(&row))?;
        put(&mut out, &connection, engines, names)?;
    }
    Ok(())
}

/// The addresses in such a text, for names. Rows of another form have none.
pub(super) fn addresses(rows: &str) -> BTreeSet<IpAddr> {
    let of = |row: Connection<'_>| [row.client.0, row.vip.0, row.real_server.0];
    rows.lines()
        .skip(1)
        .filter_map(parse)
        .flat_map(of)
        .collect()
}

fn unreadable(row: &str) -> io::Error {
    let text = format!("unexpected row of IPVS connections: {row}");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn parse(row: &str) -> Option<Connection<'_>> {
    let mut words = row.split_ascii_whitespace();
    let protocol = words.next()?;
    let mut end = || {
        Some((
            host(words.next()?)?,
            u16::from_str_radix(words.next()?, 16).ok()?,
        ))
    };
    let (client, vip, real_server) = (end()?, end()?, end()?);
    Some(Connection {
        protocol,
        client,
        vip,
        real_server,
        state: words.next()?,
        expires_s: words.next()?.parse().ok()?,
        engine: words.next().zip(words.next()),
    })
}

/// IPv6 in colons, IPv4 as one hexadecimal number.
fn host(word: &str) -> Option<IpAddr> {
    if word.contains(':') {
        return word.parse::<Ipv6Addr>().ok().map(IpAddr::from);
    }
    let bits = u32::from_str_radix(word, 16).ok()?;
    Some(Ipv4Addr::from_bits(bits).into())
}

fn put(
    out: &mut impl Write,
    connection: &Connection<'_>,
    engines: bool,
    names: Option<&Names>,
) -> io::Result<()> {
    let protocol = match connection.protocol {
        "TCP" => Protocol::Tcp,
        "UDP" => Protocol::Udp,
        "SCTP" => Protocol::Sctp,
        _ => Protocol::Other(0),
    };
    let [client, vip, real_server] = [connection.client, connection.vip, connection.real_server]
        .map(|(host, port)| address(host, port, protocol, names));
    let expires = format!(
        "{:02}:{:02}",
        connection.expires_s / 60,
        connection.expires_s % 60
    );
    let (protocol, state) = (connection.protocol, connection.state);
    write!(
        out,
        "{protocol:<3} {expires:<6} {state:<11} {client:<18} {vip:<18} "
    )?;
    match connection.engine.filter(|_| engines) {
        Some((name, data)) => writeln!(out, "{real_server:<16} {name:<18} {data}"),
        None => writeln!(out, "{real_server}"),
    }
}
