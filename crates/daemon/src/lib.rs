//! The parts of the daemon: what comes in, what is shown, and what runs between them.
//!
//! - [`cli`]: the command line
//! - [`config`]: the configuration file and the flags together
//! - [`run`] and [`controller`]: the daemon
//! - [`init`]: what needs more privilege than the rest
//! - [`drains`]: the deadlines of drains, kept over a restart
//! - [`findings`]: what the log says of drift and of drains
//! - [`report`]: what the log says of objects, and how much of it
//! - [`surroundings`]: addresses and ports that no Service takes
//! - [`place`]: the folder under /run
//! - [`cleanup`]: removes all that is ours
//! - [`plan`]: the dry run
//! - [`translate`]: Kubernetes objects into the words of `ipvs-proxy-core`
//! - [`manifests`]: objects from files and directories of manifests, watched
//! - [`api`]: objects from a Kubernetes API server, followed
//! - [`serve`] and [`metrics`]: health and metrics over HTTP
//! - [`events`]: Events for the API server
//! - [`inspect`]: the listing and saving of `ipvsadm`
//!
//! ```
//! use ipvs_proxy::manifests::{Format, read_text};
//! use ipvs_proxy::translate;
//!
//! let text = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec:\n  clusterIP: 10.96.0.10\n  ports: [{port: 80}]\n";
//! let (objects, errors) = read_text("web.yaml", text, Format::Yaml);
//! assert_eq!(errors, []);
//! let ipvs_proxy::manifests::Object::Service(service) = &objects[0].object else { panic!() };
//! assert_eq!(translate::service(service).name.to_string(), "default/web");
//! ```

pub mod api;
pub mod cleanup;
pub mod cli;
pub mod config;
pub mod controller;
pub mod drains;
pub mod events;
pub mod findings;
mod glances;
mod hurry;
pub mod init;
pub mod inspect;
pub mod manifests;
pub mod metrics;
pub mod objects;
pub mod place;
pub mod plan;
pub mod report;
pub mod run;
pub mod serve;
pub mod surroundings;
pub mod translate;

/// Writes a line to stderr. That nobody can read it is no reason to end.
pub fn say(line: impl std::fmt::Display) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{line}");
}
