//! How the API server is reached: a kubeconfig or the pod's service account.

use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher, Hasher as _};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper::header::HeaderValue;
use ipvs_netlink::VirtualServerKey;
use ipvs_proxy_netlink::Protocol;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use secrecy::ExposeSecret;

use super::counting::{Counting, Pauses, Peers};
use crate::manifests::read_regular;
use crate::metrics::Requests;

/// How long nothing may come from the API server before the connection counts as dead. Watches
/// get a bookmark about once a minute.
const SILENCE: Duration = Duration::from_secs(90);

/// Where a pod finds the certificate authority of its API server.
const IN_CLUSTER_CA: &str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";

/// How to reach the API server.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// The kubeconfig; `None` for the service account of the pod that this runs in.
    pub kubeconfig: Option<PathBuf>,
    /// The server's address, where it is not the one that the configuration names.
    pub master: Option<String>,
    /// Where all requests are counted.
    pub requests: Requests,
    /// For how long the server wants not to be asked.
    pub pauses: Pauses,
    /// Where it was reached.
    pub peers: Peers,
}

/// Why no client can be made.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The kubeconfig can't be used.
    #[error("{}: {reason}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// Why, in one line, with all that is behind it.
        reason: String,
    },
    /// There is no service account to use.
    #[error(
        "neither --manifests nor --kubeconfig is given, and this is not a pod of a cluster: {reason}"
    )]
    InCluster {
        /// Why, in one line, with all that is behind it.
        reason: String,
    },
    /// The server's address is none.
    #[error("--master: {value:?} is no address of a server such as https://192.0.2.1:6443")]
    Master {
        /// The address as given.
        value: String,
    },
    /// A token that can't stand in a request.
    #[error("{}: the token of the current context's user has a character that no header may hold, such as a line break", path.display())]
    Token {
        /// The kubeconfig.
        path: PathBuf,
    },
    /// The credentials can't be used.
    #[error("no client for the API server can be made")]
    Client(#[source] Box<kube::Error>),
}

impl Access {
    /// A client by what the files say now, and the server's address.
    ///
    /// # Errors
    /// If a file is missing, or says what can't be used.
    pub async fn client(&self) -> Result<(Client, String), AccessError> {
        let mut config = match &self.kubeconfig {
            Some(path) => {
                let named = |error: KubeconfigError| AccessError::Kubeconfig {
                    path: path.clone(),
                    reason: first_line(&error),
                };
                let kubeconfig = read(path).map_err(named)?;
                let options = KubeConfigOptions::default();
                let config = Config::from_custom_kubeconfig(kubeconfig, &options)
                    .await
                    .map_err(named)?;
                let token = config
                    .auth_info
                    .token
                    .as_ref()
                    .map(ExposeSecret::expose_secret);
                if token.is_some_and(|token| HeaderValue::from_str(token).is_err()) {
                    return Err(AccessError::Token { path: path.clone() });
                }
                config
            }
            None => Config::incluster().map_err(|error| AccessError::InCluster {
                reason: first_line(&error),
            })?,
        };
        if let Some(value) = &self.master {
            let with_scheme = match value.contains("://") {
                true => value.clone(),
                false => format!("https://{value}"),
            };
            config.cluster_url = with_scheme.parse().map_err(|_| AccessError::Master {
                value: value.clone(),
            })?;
        }
        config.connect_timeout = Some(Duration::from_secs(10));
        config.read_timeout = Some(SILENCE);
        config.reset_reader_on_write = true;
        // The watcher has its own back-off, and says why it waits.
        config.default_retry = false;
        let server = config.cluster_url.to_string();
        let counting = Counting::new(self, &config.cluster_url);
        let client = ClientBuilder::try_from(config)
            .map_err(|error| AccessError::Client(Box::new(error)))?
            .with_layer(&counting)
            .build();
        Ok((client, server))
    }

    /// A number that changes when a file changes from which a client is made.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = BuildHasherDefault::<DefaultHasher>::default().build_hasher();
        for path in self.files() {
            hasher.write(&read_regular(&path).unwrap_or_default());
            hasher.write_u8(0);
        }
        hasher.finish()
    }

    /// The kubeconfig and the certificates that it names, or the certificate of the pod's service account. Tokens are read
    /// again by the client.
    fn files(&self) -> Vec<PathBuf> {
        let Some(path) = &self.kubeconfig else {
            return vec![PathBuf::from(IN_CLUSTER_CA)];
        };
        let folder = path.parent().unwrap_or(Path::new(""));
        let mut files = vec![path.clone()];
        if let Ok(kubeconfig) = read(path) {
            let clusters = kubeconfig.clusters.into_iter().filter_map(|c| c.cluster);
            files.extend(clusters.filter_map(|c| Some(folder.join(c.certificate_authority?))));
            let users = kubeconfig
                .auth_infos
                .into_iter()
                .filter_map(|a| a.auth_info);
            for user in users {
                let named = [user.client_certificate, user.client_key];
                files.extend(named.into_iter().flatten().map(|f| folder.join(f)));
            }
        }
        files
    }

    /// What to add to a failure to connect: the pod's way to the API server is a virtual server that
    /// this very process has yet to make.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        if self.kubeconfig.is_some() || self.master.is_some() {
            return None;
        }
        let host = std::env::var("KUBERNETES_SERVICE_HOST").ok()?;
        let port = std::env::var("KUBERNETES_SERVICE_PORT").ok()?;
        let address: IpAddr = host.parse().ok()?;
        let server = SocketAddr::new(address, port.parse().ok()?);
        let key = VirtualServerKey::Address {
            address,
            port: server.port(),
            protocol: Protocol::Tcp,
        };
        let mut ipvs = ipvs_netlink::Client::open().ok()?;
        let servers = ipvs.real_servers(key).ok()?;
        servers.is_empty().then(|| {
            format!(
                "{server} (KUBERNETES_SERVICE_HOST) is no virtual server of this node; where it is the API server's \
                 ClusterIP, this proxy has yet to make that of what the API server says: name the server's own \
                 address by --master or --kubeconfig"
            )
        })
    }
}

/// A kubeconfig. One that is no file with an end, such as a FIFO, is not waited for.
fn read(path: &Path) -> Result<Kubeconfig, KubeconfigError> {
    read_regular(path).map_err(|error| KubeconfigError::ReadConfig(error, path.to_owned()))?;
    Kubeconfig::read_from(path)
}

/// What an error says, without the lines of the file that a parser shows: there are secrets in it.
fn first_line(error: &impl std::fmt::Display) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One line, which says each thing once and nothing of the file's content.
    #[test]
    fn a_kubeconfig_that_cannot_be_used_is_named_once() {
        let path = std::env::temp_dir().join(format!("ipvs-proxy-access-{}", std::process::id()));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let access = Access {
            kubeconfig: Some(path.clone()),
            ..Access::default()
        };
        let context = "contexts: [{name: c, context: {cluster: c, user: u}}]\ncurrent-context: c\nusers: [{name: u, user: {token: secret}}]\n";
        let cluster = |more: &str| {
            format!(
                "{context}clusters: [{{name: c, cluster: {{server: 'https://192.0.2.1', {more}}}}}]\n"
            )
        };
        for (text, said) in [
            ("users: [{user: {token: secret}".to_owned(), "line"),
            ("current-context: other".to_owned(), "other"),
            (
                cluster("certificate-authority: /nonexistent"),
                "/nonexistent",
            ),
            (cluster("certificate-authority-data: '!!'"), "base64"),
        ] {
            std::fs::write(&path, &text).unwrap();
            let error = runtime.block_on(access.client()).map(|_| ()).unwrap_err();
            let shown = format!("{:#}", anyhow::Error::from(error));
            assert_eq!(shown.matches(said).count(), 1, "{shown}");
            assert!(
                shown.starts_with(&format!("{}: ", path.display())),
                "{shown}"
            );
            assert!(
                !shown.contains('\n') && !shown.contains("secret"),
                "{shown}"
            );
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[tokio::test]
    async fn a_kubeconfig_that_is_no_file_is_not_waited_for() {
        let path = std::env::temp_dir().join(format!("ipvs-proxy-fifo-{}", std::process::id()));
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let access = Access {
            kubeconfig: Some(path.clone()),
            ..Access::default()
        };
        let _ = access.fingerprint();
        let client = access.client().await;
        let error = client.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_token_that_no_header_may_hold_is_refused_by_the_files_name() {
        let path = std::env::temp_dir().join(format!("ipvs-proxy-token-{}", std::process::id()));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let client = |token: &str| {
            let text = format!(
                "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{name: c, cluster: {{server: 'https://192.0.2.1:6443'}}}}]\n\
                 users: [{{name: u, user: {{token: {token}}}}}]\ncontexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n"
            );
            std::fs::write(&path, text).unwrap();
            let access = Access {
                kubeconfig: Some(path.clone()),
                ..Access::default()
            };
            runtime.block_on(access.client())
        };
        assert!(client("abc").is_ok());
        for token in ["\"abc\\n\"", "\"a\\nb\"", "\"a\\u0001\""] {
            let error = client(token).map(|_| ()).unwrap_err().to_string();
            assert!(
                error.contains(&path.display().to_string()) && error.contains("token"),
                "{error}"
            );
        }
        std::fs::remove_file(&path).unwrap();
    }
}
