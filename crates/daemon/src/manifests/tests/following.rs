//! Manifests that are followed: what is told, and what waits for what.

use super::*;

/// What [`follow`] tells.
struct Followed(std::sync::mpsc::Receiver<News>);

impl Followed {
    fn new(source: Source) -> Followed {
        let (sender, news) = std::sync::mpsc::channel();
        follow(source, move |news| sender.send(news).is_ok()).unwrap();
        Followed(news)
    }

    fn news(&self) -> News {
        self.0.recv_timeout(Duration::from_secs(60)).unwrap()
    }

    /// The Services that come and go, as far as the one that is waited for.
    fn until(&self, last: &str) -> Vec<String> {
        let mut seen = Vec::new();
        while !seen.iter().any(|seen| seen == last) {
            seen.extend(said(self.news().changes));
        }
        seen
    }
}

/// Services enough for a file that takes a while.
fn large(address: &str) -> String {
    let services = (0..4000).map(|n| format!("---\n{}", service_text(&format!("l{n}"), address)));
    let text: String = services.collect();
    assert!(text.len() > 256 << 10, "{}", text.len());
    text
}

#[test]
fn a_large_file_holds_up_no_other() {
    let dir = Scratch::new("large");
    dir.write("a.yaml", &large("10.0.0.1"));
    dir.write("b.yaml", &service_text("b", "10.0.0.2"));
    let followed = Followed::new(dir.source());
    let first = followed.news();
    assert_eq!((first.changes.len(), first.complete), (4001, true), "whole");
    for n in 3..6 {
        dir.replace("a.yaml", &large(&format!("10.0.1.{n}")));
        let changed = Instant::now();
        dir.replace("b.yaml", &service_text("b", &format!("10.0.0.{n}")));
        assert_eq!(said(followed.news().changes), [format!("+b 10.0.0.{n}")]);
        let b = changed.elapsed();
        followed.until(&format!("+l3999 10.0.1.{n}"));
        let a = changed.elapsed();
        assert!(b * 3 < a, "{b:?} {a:?}");
    }
}

#[test]
fn of_many_changed_files_the_newest_is_told_first() {
    let dir = Scratch::new("many");
    let pad = format!("# {}\n", "x".repeat(20_000));
    let write = |n: usize, address: &str| {
        let text = format!("{pad}{}", service_text(&format!("m{n}"), address));
        dir.write(&format!("m{n}.yaml"), &text);
    };
    (0..100).for_each(|n| write(n, "10.0.0.1"));
    dir.write("z.yaml", &service_text("z", "10.0.0.1"));
    let (ticks, _) = std::sync::mpsc::sync_channel(1);
    let mut source = dir.source().with_aside(aside::Aside::start(ticks).unwrap());
    while source.is_behind() || source.has_more() {
        changes(&mut source);
    }
    while changes(&mut source).len() + usize::from(source.has_more()) > 0 {}
    (0..100).for_each(|n| write(n, "10.0.0.2"));
    std::thread::sleep(Duration::from_millis(20));
    dir.write("z.yaml", &service_text("z", "10.0.0.3"));
    let first = changes(&mut source);
    assert!(first.contains(&"+z 10.0.0.3".to_owned()), "{first:?}");
    assert!(first.len() < 20 && source.has_more(), "{}", first.len());
    let mut told = first.len();
    while source.has_more() {
        told += changes(&mut source).len();
    }
    assert_eq!(told, 101);
}

/// It is deleted and made anew in no order: an object that moves to a file that takes long is not gone meanwhile.
#[test]
fn an_object_that_moves_to_a_large_file_is_not_gone_meanwhile() {
    let dir = Scratch::new("moves");
    dir.write("a.yaml", &service_text("a", "10.0.0.1"));
    dir.write("b.yaml", &service_text("b", "10.0.0.1"));
    let followed = Followed::new(dir.source());
    assert_eq!(followed.news().changes.len(), 2);
    let moved = format!(
        "{}---\n{}",
        large("10.0.0.3"),
        service_text("a", "10.0.0.1")
    );
    dir.replace("z.yaml", &moved);
    fs::remove_file(dir.path("a.yaml")).unwrap();
    fs::remove_file(dir.path("b.yaml")).unwrap();
    let seen = followed.until("+l3999 10.0.0.3");
    assert!(!seen.contains(&"-a".to_owned()), "{seen:?}");
    // What did not move goes then.
    assert!(seen.contains(&"-b".to_owned()), "{seen:?}");
    fs::remove_file(dir.path("z.yaml")).unwrap();
    followed.until("-a");
}

#[test]
fn a_large_file_that_becomes_small_or_goes_is_what_it_was_last() {
    let dir = Scratch::new("shrinks");
    dir.write("a.yaml", &service_text("a", "10.0.0.1"));
    let followed = Followed::new(dir.source());
    assert_eq!(followed.until("+a 10.0.0.1"), ["+a 10.0.0.1"]);
    for n in 2..8 {
        dir.replace("a.yaml", &large("10.0.0.3"));
        std::thread::sleep(Duration::from_millis(20 * n));
        dir.replace("a.yaml", &service_text("a", &format!("10.0.0.{n}")));
        followed.until(&format!("+a 10.0.0.{n}"));
    }
    dir.write("b.yaml", &large("10.0.0.3"));
    std::thread::sleep(Duration::from_millis(100));
    fs::remove_file(dir.path("b.yaml")).unwrap();
    fs::remove_file(dir.path("a.yaml")).unwrap();
    followed.until("-a");
}
