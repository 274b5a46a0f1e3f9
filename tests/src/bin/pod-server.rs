//! A pod's program: answers on a TCP and a UDP port with its name and the address it was asked from, until it is ended.
//!
//! ```text
//! pod-server NAME PORT
//! ```

use anyhow::{Context, Result};
use tests::traffic::Server;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().context("no name is given")?;
    let port = arguments.next().context("no port is given")?.parse()?;
    let _server = Server::listen(&name, port)?;
    loop {
        std::thread::park();
    }
}
