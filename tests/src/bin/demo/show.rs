//! Takes apart what the tools print, to show the part that matters.

use std::collections::BTreeMap;

/// The lines of one virtual server in an `ipvsadm -Ln` listing: the server's, then one for each real server.
pub(crate) fn virtual_server<'a>(listing: &'a str, start: &str) -> Vec<&'a str> {
    let mut lines = listing.lines().skip_while(|line| !line.starts_with(start));
    let server = lines.next();
    server
        .into_iter()
        .chain(lines.take_while(|line| line.starts_with("  ->")))
        .collect()
}

/// The weight of a real server in a virtual server's lines, `None` when it is not there.
pub(crate) fn weight(lines: &[&str], real_server: &str) -> Option<u32> {
    let mut words = lines.iter().map(|line| line.split_whitespace());
    let mut found = words.find_map(|mut words| words.any(|w| w == real_server).then_some(words))?;
    found.nth(1)?.parse().ok() // after the forwarding method
}

/// The numbers of virtual servers and of real servers.
pub(crate) fn numbers(listing: &str) -> (usize, usize) {
    let starting = |words: &[&str]| {
        listing
            .lines()
            .filter(|line| words.iter().any(|word| line.starts_with(word)))
            .count()
    };
    (
        starting(&["TCP ", "UDP "]),
        starting(&["  -> "]).saturating_sub(1),
    ) // less the heading
}

/// The rules in or to our chains, as `iptables-save` prints them, without their comments.
pub(crate) fn rules(saved: &str) -> Vec<String> {
    const COMMENT: &str = " -m comment --comment \"";
    let ours = saved
        .lines()
        .filter(|line| line.starts_with("-A ") && line.contains("KUBE-"));
    let bare = ours.map(|line| match line.split_once(COMMENT) {
        Some((before, after)) => {
            format!(
                "{before}{}",
                after.split_once('"').map_or("", |(_, rest)| rest)
            )
        }
        None => line.to_owned(),
    });
    bare.collect()
}

/// The entries of each set in what `ipset save` prints.
pub(crate) fn sets(saved: &str) -> BTreeMap<String, Vec<String>> {
    let mut sets: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in saved.lines() {
        let mut words = line.split_whitespace();
        if let (Some(verb), Some(set)) = (words.next(), words.next()) {
            let entries = sets.entry(set.to_owned()).or_default();
            entries.extend(
                words
                    .next()
                    .filter(|_| verb == "add")
                    .map(ToOwned::to_owned),
            );
            entries.sort();
        }
    }
    sets
}

/// The first of a list, and how many there are beside it.
pub(crate) fn some_of(entries: &[String]) -> String {
    match entries {
        [] => String::new(),
        [one] => one.clone(),
        [first, others @ ..] => format!("{first} and {} more", others.len()),
    }
}

/// As `pod2 4, pod3 4, pod4 4`.
pub(crate) fn spread(counts: &BTreeMap<String, usize>) -> String {
    let count = |pod| counts.get(pod).copied().unwrap_or(0);
    ["pod2", "pod3", "pod4"]
        .map(|pod| format!("{pod} {}", count(pod)))
        .join(", ")
}
