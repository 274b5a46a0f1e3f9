//! How long a change takes from the API server to the kernel: replaces an EndpointSlice again and again, and looks at the IPVS table.
//!
//! ```text
//! api-to-kernel SERVER PATH VIP:PORT ROUNDS POD:PORT=BODY-FILE POD:PORT=BODY-FILE
//! ```
//!
//! SERVER speaks plain HTTP. Each round sends the next body and waits until its pod is the one real server that has weight. Prints two
//! numbers of microseconds a round: from the request, and from the answer (less than nothing when the kernel was first).

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ipvs_netlink::{Client, VirtualServerKey};
use ipvs_proxy_netlink::Protocol;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [server, path, vip, rounds, bodies @ ..] = arguments.as_slice() else {
        anyhow::bail!("usage: api-to-kernel SERVER PATH VIP:PORT ROUNDS POD:PORT=FILE...");
    };
    let vip: SocketAddr = vip.parse()?;
    let key = VirtualServerKey::Address {
        address: vip.ip(),
        port: vip.port(),
        protocol: Protocol::Tcp,
    };
    let mut steps = Vec::new();
    for body in bodies {
        let (pod, file) = body.split_once('=').context("POD:PORT=FILE")?;
        steps.push((pod.parse::<SocketAddr>()?, std::fs::read_to_string(file)?));
    }
    let mut ipvs = Client::open()?;
    let mut to = TcpStream::connect(server)?;
    to.set_nodelay(true)?;
    let mut from = BufReader::new(to.try_clone()?);
    for (pod, body) in steps.iter().cycle().take(rounds.parse()?) {
        let started = Instant::now();
        write!(
            to,
            "PUT {path} HTTP/1.1\r\nHost: {server}\r\nAuthorization: Bearer admin-token\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        answer(&mut from)?;
        let answered = started.elapsed();
        loop {
            let servers = ipvs.real_servers(key)?;
            let mut serving = servers.iter().filter(|entry| entry.server.weight > 0);
            let here = |found: &ipvs_netlink::RealServer| {
                found.key.address == pod.ip() && found.key.port == pod.port()
            };
            if serving.next().is_some_and(|entry| here(&entry.server)) && serving.next().is_none() {
                break;
            }
            ensure!(
                started.elapsed() < Duration::from_secs(100),
                "{pod} does not become the real server of {vip}"
            );
            // The guest has one processor, which the proxy needs.
            std::thread::yield_now();
        }
        let reached = started.elapsed();
        let after = i128::try_from(reached.as_micros())? - i128::try_from(answered.as_micros())?;
        writeln!(std::io::stdout(), "{} {after}", reached.as_micros())?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Reads one answer, which must be a success.
fn answer(from: &mut BufReader<TcpStream>) -> Result<()> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    ensure!(line.contains(" 200 "), "the API server said {line}");
    let mut length = 0;
    loop {
        line.clear();
        from.read_line(&mut line)?;
        let header = line.trim_end().to_ascii_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("content-length:") {
            length = value.trim().parse()?;
        }
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body)?;
    Ok(())
}
