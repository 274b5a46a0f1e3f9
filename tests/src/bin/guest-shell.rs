//! The guest as a machine of a network: runs what comes over TCP as root's shell would, until it is ended.
//!
//! ```text
//! guest-shell ADDRESS/LENGTH
//! ```
//!
//! Gives the address to the link `vec0` and listens on its port 2222. A connection carries one script, ends it by
//! shutting its half down, and gets all output back, and after a zero byte the exit code. Anybody who reaches the port is
//! root in the guest, so it is for a link that leads to a network namespace of a test alone.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, ensure};

fn main() -> Result<()> {
    let address = std::env::args().nth(1).context("no address is given")?;
    let lines = format!("addr add {address} dev vec0\nlink set vec0 up\n");
    for line in lines.lines() {
        let status = Command::new("ip").args(line.split(' ')).status()?;
        ensure!(status.success(), "ip {line}: {status}");
    }
    let (ip, _) = address.split_once('/').context("an address has a length")?;
    let listener = TcpListener::bind((ip, 2222))?;
    for connection in listener.incoming() {
        let connection = connection?;
        thread::spawn(move || answer(connection));
    }
    Ok(())
}

fn answer(mut connection: TcpStream) -> Result<()> {
    let mut script = String::new();
    connection.read_to_string(&mut script)?;
    let output = Command::new("bash")
        .args(["-c", &format!("exec 2>&1; {script}")])
        .stdin(Stdio::null())
        .output()?;
    connection.write_all(&output.stdout)?;
    let code = output.status.code().unwrap_or(255);
    write!(connection, "\0{code}")?;
    connection.shutdown(Shutdown::Both)?;
    Ok(())
}
