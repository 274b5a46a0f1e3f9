//! A pod's server for demonstrations: `pod NAME` answers with its name and its caller's address, HTTP and UDP on 8080, UDP on 5353 too.

use std::io;

use tests::traffic::Server;

fn main() -> io::Result<()> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "pod".into());
    let _servers = [Server::listen(&name, 8080)?, Server::listen(&name, 5353)?];
    loop {
        std::thread::park();
    }
}
