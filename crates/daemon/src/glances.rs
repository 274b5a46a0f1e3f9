//! What a glance at the kernel tells: whether others changed much since it was read.

use std::collections::BTreeMap;

use ipvs_proxy_core::op::Glance;
use ipvs_proxy_core::state::Set;

/// What is known from earlier glances.
#[derive(Debug, Default)]
pub(crate) struct Glances {
    /// The most rules that looked into each set since the rules were read.
    rules: BTreeMap<Set, u32>,
    /// What the last audit was brought forward for: it is not for the same again.
    told: Option<Glance>,
    /// Of which instance of IPVS the sysctls were set.
    module: Option<u16>,
}

impl Glances {
    /// Whether the kernel has to be read: a set has not as many entries as it should have, rules no longer look into it, or a
    /// virtual server is gone.
    ///
    /// `references` are those that our own rules in the kernel have to each set; others may look into it as well.
    pub(crate) fn differ(
        &mut self,
        glance: &Glance,
        entries: &BTreeMap<Set, u32>,
        references: &BTreeMap<Set, u32>,
    ) -> bool {
        let held = |set: &Set| entries.get(set).copied().unwrap_or_default();
        let lost =
            |(set, rules): (&Set, &u32)| glance.sets.get(set).is_none_or(|(_, now)| now < rules);
        let differs = !glance.missing.is_empty()
            || glance
                .sets
                .iter()
                .any(|(set, (number, _))| *number != held(set))
            || self.rules.iter().chain(references).any(lost);
        for (set, (_, rules)) in &glance.sets {
            let most = self.rules.entry(*set).or_default();
            *most = (*most).max(*rules);
        }
        if !differs {
            self.told = None;
            return false;
        }
        self.told.replace(glance.clone()).as_ref() != Some(glance)
    }

    /// Something was put right: what is found from now on is news, also where it looks as before.
    pub(crate) fn repaired(&mut self) {
        self.told = None;
    }

    /// Whether IPVS was loaded anew since the last glance.
    pub(crate) fn renewed(&mut self, glance: &Glance) -> bool {
        let before = self.module.replace(glance.module);
        before.is_some_and(|before| before != glance.module)
    }

    /// The kernel was read as a whole: how it is now is what later glances are compared with.
    pub(crate) fn audited(&mut self) {
        self.rules.clear();
    }
}

#[cfg(test)]
mod tests {
    use ipvs_netlink::VirtualServerKey;
    use ipvs_proxy_core::state::Role;
    use ipvs_proxy_netlink::Family;

    use super::*;

    #[test]
    fn a_loss_is_told_once_and_again_after_it_was_over() {
        let set = Set {
            family: Family::V4,
            role: Role::ClusterIp,
        };
        let entries = BTreeMap::from([(set, 3)]);
        let glance = |number, rules| Glance {
            sets: [(set, (number, rules))].into(),
            ..Glance::default()
        };
        let ours = BTreeMap::from([(set, 2)]);
        let mut glances = Glances::default();
        let mut differ = |glance: &Glance| glances.differ(glance, &entries, &ours);
        assert!(!differ(&glance(3, 2)));
        // Entries that were flushed, or that others added.
        assert!(differ(&glance(0, 2)));
        assert!(!differ(&glance(0, 2)), "told");
        assert!(!differ(&glance(3, 2)));
        assert!(differ(&glance(4, 2)));
        // It is put right, and done again before the next glance.
        glances.repaired();
        let mut differ = |glance: &Glance| glances.differ(glance, &entries, &ours);
        assert!(differ(&glance(4, 2)));
        // Chains that were flushed; more rules that look into the set are somebody else's affair.
        assert!(!differ(&glance(3, 4)));
        assert!(differ(&glance(3, 0)));
        // A set that is gone.
        assert!(differ(&Glance::default()));
        // A virtual server that is gone.
        let server = VirtualServerKey::FirewallMark {
            mark: 1,
            family: Family::V4,
        };
        let mut gone = glance(3, 4);
        gone.missing.insert(server);
        assert!(differ(&gone));
        glances.audited();
        // Those of others that went meanwhile; ours are not there yet.
        assert!(!glances.differ(&glance(3, 2), &entries, &ours));
        assert!(!glances.differ(&glance(3, 2), &entries, &BTreeMap::new()));
        glances.audited();
        assert!(!glances.differ(&glance(3, 1), &entries, &BTreeMap::new()));
        glances.audited();
        assert!(
            glances.differ(&glance(3, 1), &entries, &ours),
            "lost before the first glance"
        );
    }

    #[test]
    fn a_module_that_was_loaded_anew_is_told_once() {
        let glance = |module| Glance {
            module,
            ..Glance::default()
        };
        let mut glances = Glances::default();
        let told = [7, 7, 8, 8, 7].map(|module| glances.renewed(&glance(module)));
        assert_eq!(told, [false, false, true, false, true]);
    }
}
