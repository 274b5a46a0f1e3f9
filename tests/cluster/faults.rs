//! A proxy in front of the API server that has bad days. Plain HTTP on its own side, so that it can speak for the server.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::plane::HOST;

/// What it does with requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Hands them on.
    Pass,
    /// Hands them on, and in answers puts the second text in the place of the first, which is as long.
    Replace(&'static str, &'static str),
    /// Takes connections and never answers; those that are open fall silent.
    Hang,
    /// Answers each with this status.
    Status(u16),
    /// Closes every connection at once.
    Refuse,
}

/// The proxy, on a port of its own.
#[derive(Debug)]
pub(crate) struct Faults {
    mode: Arc<Mutex<Mode>>,
    open: Arc<Mutex<Vec<TcpStream>>>,
    address: String,
}

impl Faults {
    /// A proxy that passes everything on.
    pub(crate) fn start(authority: &Path) -> Faults {
        let listener = TcpListener::bind((HOST, 0)).unwrap();
        let this = Faults {
            mode: Arc::new(Mutex::new(Mode::Pass)),
            open: Arc::default(),
            address: listener.local_addr().unwrap().to_string(),
        };
        let (mode, open) = (Arc::clone(&this.mode), Arc::clone(&this.open));
        let authority = authority.to_owned();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                open.lock().unwrap().push(client.try_clone().unwrap());
                let (mode, authority) = (Arc::clone(&mode), authority.clone());
                // A connection that breaks is what this is for.
                thread::spawn(move || serve(client, &mode, authority).ok());
            }
        });
        this
    }

    /// The URL for a kubeconfig.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Changes what it does. Open connections end, but for a hang they fall silent.
    pub(crate) fn set(&self, mode: Mode) {
        *self.mode.lock().unwrap() = mode;
        if mode != Mode::Hang {
            for connection in self.open.lock().unwrap().drain(..) {
                let _ = connection.shutdown(Shutdown::Both);
            }
        }
    }
}

fn serve(
    mut client: TcpStream,
    mode: &Arc<Mutex<Mode>>,
    authority: PathBuf,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    let mut byte = [0];
    let now = || *mode.lock().unwrap();
    if now() == Mode::Refuse {
        return client.shutdown(Shutdown::Both);
    }
    while !head.ends_with(b"\r\n\r\n") {
        if client.read(&mut byte)? == 0 {
            return Ok(());
        }
        head.extend(byte);
    }
    match now() {
        Mode::Status(code) => {
            let body = format!(
                "{{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"metadata\":{{}},\"status\":\"Failure\",\
                 \"message\":\"a bad day\",\"reason\":\"Unknown\",\"code\":{code}}}"
            );
            write!(
                client,
                "HTTP/1.1 {code} Bad Day\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
                 Connection: close\r\n\r\n{body}",
                body.len()
            )?;
            return client.shutdown(Shutdown::Both);
        }
        Mode::Hang => {
            while now() == Mode::Hang {
                thread::sleep(Duration::from_millis(50));
            }
            return client.shutdown(Shutdown::Both);
        }
        Mode::Refuse => return client.shutdown(Shutdown::Both),
        Mode::Pass | Mode::Replace(..) => {}
    }
    let mut upstream = Command::new("openssl")
        .args([
            "s_client",
            "-quiet",
            "-verify_quiet",
            "-verify_return_error",
        ])
        .args(["-connect", &format!("{HOST}:6443")])
        .arg("-CAfile")
        .arg(authority)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut to = upstream.stdin.take().unwrap();
    let mut from = upstream.stdout.take().unwrap();
    to.write_all(&head)?;
    to.flush()?;
    let mut requests = client.try_clone()?;
    thread::spawn(move || {
        // Not by io::copy: its splice() keeps the pipe from its reader while it waits for the socket.
        let mut buffer = [0; 16 << 10];
        while let Ok(length @ 1..) = requests.read(&mut buffer) {
            if to.write_all(&buffer[..length]).is_err() {
                break;
            }
        }
        let _ = upstream.kill();
        let _ = upstream.wait();
    });
    let mut buffer = [0; 16 << 10];
    loop {
        let length = from.read(&mut buffer)?;
        while now() == Mode::Hang {
            thread::sleep(Duration::from_millis(50));
        }
        if length == 0 {
            return client.shutdown(Shutdown::Both);
        }
        if let Mode::Replace(text, by) = now() {
            replace(&mut buffer[..length], text.as_bytes(), by.as_bytes());
        }
        client.write_all(&buffer[..length])?;
    }
}

/// An answer that is cut in the middle of the text is none that a test waits for.
fn replace(bytes: &mut [u8], text: &[u8], by: &[u8]) {
    assert_eq!(text.len(), by.len());
    for at in 0..bytes.len() {
        if bytes[at..].starts_with(text) {
            bytes[at..at + by.len()].copy_from_slice(by);
        }
    }
}
