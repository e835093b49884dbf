//! What suites measured, run after run, in an SQLite file: the gate appends, and this reads since when something is worse.

mod page;
mod store;
pub mod trend;

pub use page::render as page;
pub use store::{History, Run, Series, What};

use std::process::Command;

/// Names the commit that is tested, where neither git nor a CI system that is known says it.
pub const COMMIT_VARIABLE: &str = "PARITY_COMMIT";
/// Names the machine, where its host name says nothing: runners of a cloud have a new one each time.
pub const MACHINE_VARIABLE: &str = "PARITY_MACHINE";

/// The commit that is tested: as the environment says (ours, GitHub's, GitLab's), or the one that is checked out here.
pub fn commit() -> Option<String> {
    let said = [COMMIT_VARIABLE, "GITHUB_SHA", "CI_COMMIT_SHA"];
    let said = said.iter().find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
    said.or_else(|| {
        let git = Command::new("git").args(["rev-parse", "HEAD"]).output().ok()?;
        let text = String::from_utf8(git.stdout).ok().filter(|_| git.status.success())?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    })
}

/// The machine: as the environment says, or by its host name and processor's architecture.
pub fn machine() -> String {
    let host = || {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
        let names = ["HOSTNAME", "COMPUTERNAME"].iter().filter_map(|name| std::env::var(name).ok());
        let name = kernel.into_iter().chain(names).map(|name| name.trim().to_owned()).find(|n| !n.is_empty());
        format!("{} ({})", name.unwrap_or_else(|| "unknown".to_owned()), std::env::consts::ARCH)
    };
    std::env::var(MACHINE_VARIABLE).ok().filter(|name| !name.is_empty()).unwrap_or_else(host)
}
