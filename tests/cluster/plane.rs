//! The control plane: etcd and kube-apiserver as processes of the test, with files in a folder of their own.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tests::daemon::wait_up_to;

/// The host's end of the tap: where the API server listens.
pub(crate) const HOST: &str = "192.168.60.1";

/// The users of the API server: token, name, number, groups.
const USERS: &str = "admin-token,admin,1,system:masters\n\
    proxy-token,system:kube-proxy,2\n\
    second-token,system:kube-proxy,3\n\
    stranger-token,stranger,4\n";

/// A control plane. Ended with this value.
#[derive(Debug)]
pub(crate) struct Plane {
    folder: PathBuf,
    programs: PathBuf,
    etcd: Child,
    api: Option<Child>,
}

impl Plane {
    /// Starts it in an empty folder and waits until it is ready.
    pub(crate) fn start(folder: &Path) -> Plane {
        let programs = std::env::var_os("UPSTREAM_PROGRAMS")
            .expect("UPSTREAM_PROGRAMS names the folder of etcd and kube-apiserver");
        let programs = PathBuf::from(programs);
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("users.csv"), USERS).unwrap();
        let key = folder.join("sa.key");
        let made = Command::new("openssl")
            .args(["genrsa", "-out"])
            .arg(&key)
            .arg("2048")
            .output()
            .expect("openssl");
        assert!(made.status.success());
        let etcd = Command::new(programs.join("etcd"))
            .arg("--data-dir")
            .arg(folder.join("etcd"))
            .args(["--unsafe-no-fsync", "--log-level", "warn"])
            .args(["--listen-client-urls", "http://127.0.0.1:2379"])
            .args(["--advertise-client-urls", "http://127.0.0.1:2379"])
            .args(["--listen-peer-urls", "http://127.0.0.1:2380"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(folder.join("etcd.log")).unwrap())
            .spawn()
            .expect("starting etcd");
        let mut this = Plane {
            folder: folder.to_owned(),
            programs,
            etcd,
            api: None,
        };
        this.start_api();
        this
    }

    /// Starts the API server and waits until it is ready.
    pub(crate) fn start_api(&mut self) {
        assert!(self.api.is_none(), "it runs already");
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.folder.join("apiserver.log"))
            .unwrap();
        let key = self.folder.join("sa.key");
        let program = std::env::var_os("KUBE_APISERVER").unwrap_or("kube-apiserver".into());
        let api = Command::new(self.programs.join(program))
            .args(["--etcd-servers", "http://127.0.0.1:2379"])
            .args(["--bind-address", HOST, "--advertise-address", HOST])
            .args([
                "--secure-port",
                "6443",
                "--profiling=false",
                "--allow-privileged",
            ])
            .args(["--service-cluster-ip-range", "10.96.0.0/12,fd96::/112"])
            .args(["--authorization-mode", "RBAC"])
            .args(["--disable-admission-plugins", "ServiceAccount"])
            .args(["--service-account-issuer", "https://kubernetes.default.svc"])
            .arg("--service-account-key-file")
            .arg(&key)
            .arg("--service-account-signing-key-file")
            .arg(&key)
            .arg("--token-auth-file")
            .arg(self.folder.join("users.csv"))
            .arg("--cert-dir")
            .arg(self.folder.join("certificates"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("starting kube-apiserver");
        self.api = Some(api);
        wait_up_to(Duration::from_secs(120), "the API server is ready", || {
            self.try_request("GET", "/readyz", "")
                .is_some_and(|(code, _)| code == 200)
        });
    }

    /// Sends the API server a signal: STOP and CONT make it hang and go on.
    pub(crate) fn signal_api(&self, signal: Signal) {
        let pid = self.api.as_ref().expect("it runs").id();
        kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap();
    }

    /// Ends the API server without a word.
    pub(crate) fn kill_api(&mut self) {
        if let Some(mut api) = self.api.take() {
            let _ = api.kill();
            let _ = api.wait();
        }
    }

    /// Makes the API server's next start make another certificate, of another authority.
    pub(crate) fn forget_certificate(&self) {
        fs::remove_dir_all(self.folder.join("certificates")).unwrap();
    }

    /// A kubeconfig for a server and a user.
    pub(crate) fn kubeconfig(&self, server: &str, token: &str) -> String {
        let authority = match server.starts_with("https:") {
            true => {
                let pem = fs::read(self.authority()).unwrap();
                format!("\n    certificate-authority-data: {}", base64(&pem))
            }
            false => String::new(),
        };
        format!(
            "apiVersion: v1\nkind: Config\nclusters:\n- name: test\n  cluster:\n    server: {server}{authority}\n\
             users:\n- name: user\n  user:\n    token: {token}\n\
             contexts:\n- name: test\n  context: {{cluster: test, user: user}}\ncurrent-context: test\n"
        )
    }

    /// The certificate of the authority behind the API server's own.
    pub(crate) fn authority(&self) -> PathBuf {
        self.folder.join("certificates/apiserver.crt")
    }

    /// A request as the administrator: the status code and the body. Panics when there is no answer.
    pub(crate) fn request(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        self.try_request(method, path, body)
            .unwrap_or_else(|| panic!("no answer: {method} {path}"))
    }

    /// As [`Plane::request`]; `None` when there is no answer.
    pub(crate) fn try_request(&self, method: &str, path: &str, body: &str) -> Option<(u16, Value)> {
        let answer = self.curl(&format!("{}\n", entry(method, path, body)))?;
        let (body, code) = answer.rsplit_once('\n')?;
        let body = serde_json::from_str(body).unwrap_or(Value::Null);
        Some((code.parse().ok()?, body))
    }

    /// Creates many objects over few connections.
    pub(crate) fn create_all(&self, objects: &[(String, String)]) {
        let entries: Vec<String> = objects
            .iter()
            .map(|(path, body)| entry("POST", path, body))
            .collect();
        let parts = entries.len().div_ceil(4).max(1);
        std::thread::scope(|scope| {
            for part in entries.chunks(parts) {
                scope.spawn(|| {
                    let answers = self.curl(&part.join("next\n")).expect("answers");
                    let made = answers.lines().filter(|line| *line == "201").count();
                    assert_eq!(made, part.len(), "all were created");
                });
            }
        });
    }

    /// What curl says to a configuration of requests.
    fn curl(&self, configuration: &str) -> Option<String> {
        let mut child = Command::new("curl")
            .args(["--silent", "--max-time", "60", "--config", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("curl");
        // Each request needs these again.
        let each = format!(
            "cacert = \"{}\"\nheader = \"Authorization: Bearer admin-token\"\n\
             write-out = \"\\n%{{http_code}}\\n\"\n",
            self.authority().display()
        );
        let whole: String = configuration
            .split_inclusive("next\n")
            .map(|part| format!("{each}{part}"))
            .collect();
        let mut input = child.stdin.take().unwrap();
        let writer = std::thread::spawn(move || input.write_all(whole.as_bytes()));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        (output.status.success()).then(|| text.trim_end().to_owned())
    }

    /// What the API server has logged, its last lines.
    pub(crate) fn last_words(&self) -> String {
        let log = fs::read_to_string(self.folder.join("apiserver.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().rev().take(15).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the API server's last words:\n{}", self.last_words());
        }
        self.kill_api();
        let _ = self.etcd.kill();
        let _ = self.etcd.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn entry(method: &str, path: &str, body: &str) -> String {
    let form = match body.starts_with('{') {
        true => "json",
        false => "yaml",
    };
    let body = body
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    let data = match body.is_empty() {
        true => String::new(),
        false => {
            format!("header = \"Content-Type: application/{form}\"\ndata-binary = \"{body}\"\n")
        }
    };
    format!("url = \"https://{HOST}:6443{path}\"\nrequest = \"{method}\"\n{data}")
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let letter = |bits: u32| char::from(LETTERS[usize::try_from(bits & 63).unwrap()]);
    bytes
        .chunks(3)
        .flat_map(|part| {
            let at = |i: usize| u32::from(part.get(i).copied().unwrap_or(0));
            let bits = at(0) << 16 | at(1) << 8 | at(2);
            let padded = |i: usize, shift: u32| match part.len() > i {
                true => letter(bits >> shift),
                false => '=',
            };
            [
                letter(bits >> 18),
                letter(bits >> 12),
                padded(1, 6),
                padded(2, 0),
            ]
        })
        .collect()
}
