//! A shell on the node, with the daemon running.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use tests::daemon::binary;

use crate::{PODS, Stage};

const HINT: &str = "\
You are on the node 192.168.10.11. The daemon runs on the manifests in this directory: edit them and look.

  ipvsadm -Ln                        the virtual servers (this is `ipvs-proxy ipvsadm`)
  curl 10.96.0.10                    ask app1 from the node: who answers, and whom it saw asking
  pod 5 curl 10.96.0.10              ask from pod 10.0.0.5; 10.0.0.2, .3 and .4 are app1's
  outside curl 192.168.10.11:30080   ask the node port from another machine
  sed -i s/10.0.0.4/10.0.0.5/ app1.yaml     one endpoint for another
  sed -i s/30080/30081/ app1.yaml           another node port
  rm app1.yaml                              no Service
  ipset save; iptables-save          what else the daemon keeps
  log                                what the daemon says
  exit
";

/// Runs bash until the reader leaves it.
pub(crate) fn run(stage: &Stage) {
    let topology = &stage.topology;
    let folder = stage.manifests.path().with_extension("shell");
    let programs = folder.join("bin");
    fs::create_dir_all(&programs).expect("a folder for the shell");
    for name in ["ipvs-proxy", "ipvsadm"] {
        symlink(binary(), programs.join(name)).expect("linking the binary");
    }
    let mut functions = String::from("PS1='node# '\npod() {\n  local net\n  case \"${1-}\" in\n");
    for pod in 0..PODS {
        let path = topology.pod(pod).path();
        functions += &format!("  {}) net={path} ;;\n", pod + 2);
    }
    functions += &format!(
        "  *) echo 'pod 2|3|4|5 COMMAND...'; return 2 ;;\n  esac\n  shift\n  nsenter --net=\"$net\" -- \"$@\"\n}}\n\
         outside() {{ nsenter --net={} -- \"$@\"; }}\nlog() {{ cat '{}'; }}\n",
        topology.outside().path(),
        stage.daemon.log_file().display(),
    );
    let start = folder.join("bashrc");
    fs::write(&start, functions).expect("writing the shell's functions");

    print!("{HINT}");
    let path = std::env::var("PATH").unwrap_or_default();
    let mut bash = Command::new("bash");
    bash.arg("--rcfile")
        .arg(&start)
        .arg("-i")
        .current_dir(stage.manifests.path());
    bash.env("PATH", format!("{}:{path}", programs.display()));
    let ended = topology
        .node()
        .spawn(&mut bash)
        .and_then(|mut bash| bash.wait());
    let _ = fs::remove_dir_all(&folder);
    ended.expect("running bash");
    // How its last command ended is the reader's affair.
}
