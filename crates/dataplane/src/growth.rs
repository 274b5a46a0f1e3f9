//! Lets a set of ours hold more entries than it was made for.
//!
//! A set's limit (`maxelem`) can't be changed. So a set with a higher one is made beside it and
//! filled, and the two are swapped in one step: a rule that looks into the set sees the old
//! entries or the new ones, never less.
//!
//! Sets are made with the limit that kube-proxy gives its own, although a higher one takes no
//! memory (the kernel allocates by `hashsize`): kube-proxy stops for good at a set of its name
//! with another limit, so the node could not go back to it. Past 65536 entries it could not serve
//! the node anyway.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use ipset_rs::{Change, Client, Entry, Error, SetName, SetSpec};
use ipvs_proxy_core::state::Set;
use ipvs_proxy_netlink::Causes;

use crate::rules;

/// The set that is there while another one grows, and after a crash in that moment.
pub const GROWING: &str = "KUBE-IPVS-GROWING";

/// The kernel does not swap a set that somebody lists.
const SWAP_ATTEMPTS: u32 = 10;
const SWAP_PAUSE: Duration = Duration::from_millis(50);

fn growing() -> SetName {
    GROWING.parse().expect("the constant is a set name")
}

/// Gives a set of ours more room and adds entries that it refused as full; its new limit. On an
/// error the set is as it was.
pub(crate) fn grow(ipset: &mut Client, set: Set, more: &BTreeSet<Entry>) -> Result<u32, Error> {
    let (old, members) = ipset.list(&set.name())?;
    // Only what is listed whole can be copied.
    if old.kind != Some(set.kind()) || old.counters || old.skbinfo {
        return Err(Error::Exists);
    }
    if old
        .entries
        .is_some_and(|n| usize::try_from(n) != Ok(members.len()))
    {
        return Err(Error::Busy);
    }
    let temporary = growing();
    let usual = SetSpec::new(temporary, set.kind());
    let spec = SetSpec {
        hash_size: old.hash_size,
        max_elements: limit(members.len() + more.len()).max(usual.max_elements),
        ..usual
    };
    let mut changes = vec![Change::Destroy(temporary), Change::Create(spec)];
    let entries = members.iter().chain(more);
    changes.extend(entries.map(|entry| Change::Add(temporary, *entry)));
    let swapped = all(ipset, &changes).and_then(|()| swap(ipset, temporary, set.name()));
    // The old entries, or what could not take their place. A leftover is harmless.
    if let Err(error) = all(ipset, &[Change::Destroy(temporary)]) {
        tracing::warn!(set = GROWING, error = %Causes(&error), "a temporary set could not be removed");
    }
    swapped.map(|()| spec.max_elements)
}

/// Removes what a crash left behind; whether there was any.
pub(crate) fn remove_leftover(ipset: &mut Client) -> Result<bool, Error> {
    let names = [growing(), rules::replacing()];
    let there = ipset.list_headers()?.into_iter().map(|set| set.name);
    let left: Vec<Change> = there
        .filter(|name| names.contains(name))
        .map(Change::Destroy)
        .collect();
    all(ipset, &left)?;
    Ok(!left.is_empty())
}

fn swap(ipset: &mut Client, new: SetName, old: SetName) -> Result<(), Error> {
    let mut left = SWAP_ATTEMPTS;
    loop {
        left -= 1;
        match all(ipset, &[Change::Swap(new, old)]) {
            Err(Error::Busy) if left > 0 => thread::sleep(SWAP_PAUSE),
            result => return result,
        }
    }
}

fn all(ipset: &mut Client, changes: &[Change]) -> Result<(), Error> {
    ipset.change(changes).into_iter().collect()
}

/// The next power of two that leaves a fifth free.
fn limit(entries: usize) -> u32 {
    let wanted = u32::try_from(entries.saturating_add(entries / 4)).unwrap_or(u32::MAX);
    wanted.checked_next_power_of_two().unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_leave_room() {
        assert_eq!(limit(52_428), 65_536);
        assert_eq!(limit(52_430), 131_072);
        assert_eq!(limit(66_000), 131_072);
        assert_eq!(limit(usize::MAX), u32::MAX);
    }
}
