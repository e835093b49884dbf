//! The file: runs, their cases, and what was measured of each checkpoint.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Transaction, params};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::gate::GateReport;
use crate::gate::baseline::Measures;

/// Tells such a file from another program's: "prty".
const APPLICATION: i32 = 0x7072_7479;
/// Version of the tables.
const VERSION: i32 = 1;
/// How long to wait for another gate that appends.
const PATIENCE: Duration = Duration::from_secs(30);

const TABLES: &str = "
CREATE TABLE runs (
  id INTEGER PRIMARY KEY, suite TEXT NOT NULL, created TEXT NOT NULL, revision TEXT, machine TEXT NOT NULL,
  shard TEXT, verdict TEXT NOT NULL);
CREATE TABLE names (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE cases (
  run INTEGER NOT NULL REFERENCES runs, name INTEGER NOT NULL REFERENCES names, status TEXT NOT NULL,
  seconds REAL, kl REAL, PRIMARY KEY (run, name)) WITHOUT ROWID;
CREATE TABLE measures (
  name INTEGER NOT NULL REFERENCES names, checkpoint INTEGER NOT NULL REFERENCES names,
  run INTEGER NOT NULL REFERENCES runs, place INTEGER NOT NULL, local REAL, distance REAL,
  PRIMARY KEY (name, checkpoint, run)) WITHOUT ROWID;
";

/// Suite, machine, case, place of the checkpoint among the others, checkpoint: the order of series.
type Key = (String, String, String, i64, Option<String>, What);
/// Number of the run, and what it measured.
type Values = Vec<(i64, Option<f64>)>;

/// A history.
pub struct History {
    path: PathBuf,
    database: Connection,
}

/// One run of a suite.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Run {
    /// Its number.
    pub id: i64,
    /// Name of the suite.
    pub suite: String,
    /// When, RFC 3339 in UTC.
    pub created: String,
    /// The commit that was tested; null where nobody said it.
    pub commit: Option<String>,
    /// Where.
    pub machine: String,
    /// Which part of the suite; null where it was all.
    pub shard: Option<String>,
    /// The answer.
    pub verdict: String,
}

/// What a number is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum What {
    /// The candidate's local error, relative L2.
    #[serde(rename = "local error")]
    Local,
    /// Its distance from the reference, relative L2.
    #[serde(rename = "distance")]
    Distance,
    /// Mean KL of the tokens, nats.
    #[serde(rename = "KL")]
    Kl,
}

/// One number of one checkpoint over the runs of one suite on one machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Series {
    /// Name of the suite.
    pub suite: String,
    /// Where it was measured.
    pub machine: String,
    /// The case.
    pub case: String,
    /// The checkpoint; null for the KL of the tokens.
    pub checkpoint: Option<String>,
    /// What it is.
    pub what: What,
    /// Number of the run, and what it measured, oldest first; null where it was not finite or no longer measured.
    pub values: Values,
}

impl History {
    /// Opens a history to append to; makes it where there is none.
    ///
    /// # Errors
    /// A file that is no history, or that cannot be written.
    pub fn append_to(path: &Path) -> Result<History> {
        let mut history = History::connect(path, rusqlite::OpenFlags::default())?;
        let new = |database: &Connection| -> rusqlite::Result<bool> {
            database.query_row("SELECT count(*) = 0 FROM sqlite_schema", [], |row| row.get(0))
        };
        let failed = history.failed();
        // One of several that begin at a time makes the tables.
        let transaction =
            history.database.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate);
        let transaction = transaction.map_err(&failed)?;
        if new(&transaction).map_err(&failed)? {
            transaction.execute_batch(TABLES).map_err(&failed)?;
            transaction.pragma_update(None, "application_id", APPLICATION).map_err(&failed)?;
            transaction.pragma_update(None, "user_version", VERSION).map_err(&failed)?;
        }
        transaction.commit().map_err(&failed)?;
        history.check()?;
        Ok(history)
    }

    /// Opens a history to read.
    ///
    /// # Errors
    /// No such file, or another.
    pub fn read(path: &Path) -> Result<History> {
        if !path.is_file() {
            return Err(Error::file(path, "there is no such history")
                .hint(format!("parity gate SUITE --history {} begins one", path.display())));
        }
        let history = History::connect(path, rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        history.check()?;
        Ok(history)
    }

    fn connect(path: &Path, flags: rusqlite::OpenFlags) -> Result<History> {
        let wrong = |e: rusqlite::Error| Error::file(path, format!("cannot be opened: {e}"));
        let database = Connection::open_with_flags(path, flags).map_err(wrong)?;
        database.busy_timeout(PATIENCE).map_err(wrong)?;
        Ok(History { path: path.to_owned(), database })
    }

    fn failed(&self) -> impl Fn(rusqlite::Error) -> Error + use<> {
        let path = self.path.clone();
        move |e| Error::file(&path, format!("is no history that can be used: {e}"))
    }

    fn check(&self) -> Result<()> {
        let pragma = |name| self.database.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
        let (application, version) = pragma("application_id")
            .and_then(|application| Ok((application, pragma("user_version")?)))
            .map_err(self.failed())?;
        if (application, version) == (APPLICATION, VERSION) {
            return Ok(());
        }
        let found =
            if application == APPLICATION { format!("version {version}") } else { "another".to_owned() };
        Err(Error::file(&self.path, "is no history of this version of parity")
            .expected(format!("an SQLite file that `parity gate --history` made, version {VERSION}"))
            .found(found))
    }

    /// Appends a run: all of it, or nothing.
    ///
    /// # Errors
    /// The file's.
    pub fn append(&mut self, report: &GateReport, commit: Option<&str>, machine: &str) -> Result<()> {
        let failed = self.failed();
        let transaction = self.database.transaction().map_err(&failed)?;
        append(&transaction, report, commit, machine).map_err(&failed)?;
        transaction.commit().map_err(failed)
    }

    /// All runs, oldest first.
    ///
    /// # Errors
    /// The file's.
    pub fn runs(&self) -> Result<Vec<Run>> {
        let read = || {
            let mut statement = self.database.prepare(
                "SELECT id, suite, created, revision, machine, shard, verdict FROM runs ORDER BY created, id",
            )?;
            let rows = statement.query_map([], |row| {
                Ok(Run {
                    id: row.get(0)?,
                    suite: row.get(1)?,
                    created: row.get(2)?,
                    commit: row.get(3)?,
                    machine: row.get(4)?,
                    shard: row.get(5)?,
                    verdict: row.get(6)?,
                })
            })?;
            rows.collect::<rusqlite::Result<Vec<_>>>()
        };
        read().map_err(self.failed())
    }

    /// Every series of the cases and checkpoints that are `wanted`: by machine and case, checkpoints in execution order, KL last.
    ///
    /// # Errors
    /// The file's.
    pub fn series(&self, wanted: impl Fn(&str, Option<&str>) -> bool) -> Result<Vec<Series>> {
        let read = || {
            let mut all: BTreeMap<Key, Values> = BTreeMap::new();
            // The place that a checkpoint had last.
            let mut statement = self.database.prepare(
                "SELECT r.suite, r.machine, c.name, k.name, r.id, m.local, m.distance,
                   (SELECT max(place) FROM measures WHERE name = m.name AND checkpoint = m.checkpoint)
                 FROM measures m JOIN runs r ON r.id = m.run JOIN names c ON c.id = m.name
                   JOIN names k ON k.id = m.checkpoint
                 ORDER BY r.created, r.id",
            )?;
            let mut rows = statement.query([])?;
            while let Some(row) = rows.next()? {
                let (case, checkpoint): (String, String) = (row.get(2)?, row.get(3)?);
                if !wanted(&case, Some(&checkpoint)) {
                    continue;
                }
                for (what, column) in [(What::Local, 5), (What::Distance, 6)] {
                    let key =
                        (row.get(0)?, row.get(1)?, case.clone(), row.get(7)?, Some(checkpoint.clone()), what);
                    all.entry(key).or_default().push((row.get(4)?, row.get(column)?));
                }
            }
            let mut statement = self.database.prepare(
                "SELECT r.suite, r.machine, c.name, r.id, s.kl FROM cases s JOIN runs r ON r.id = s.run
                   JOIN names c ON c.id = s.name ORDER BY r.created, r.id",
            )?;
            let mut rows = statement.query([])?;
            while let Some(row) = rows.next()? {
                let case: String = row.get(2)?;
                if wanted(&case, None) {
                    let key = (row.get(0)?, row.get(1)?, case, i64::MAX, None, What::Kl);
                    all.entry(key).or_default().push((row.get(3)?, row.get(4)?));
                }
            }
            // What was never measured is no series.
            all.retain(|_, values| values.iter().any(|(_, value)| value.is_some()));
            let series = |((suite, machine, case, _, checkpoint, what), values)| Series {
                suite,
                machine,
                case,
                checkpoint,
                what,
                values,
            };
            rusqlite::Result::Ok(all.into_iter().map(series).collect())
        };
        read().map_err(self.failed())
    }
}

fn append(
    to: &Transaction<'_>,
    report: &GateReport,
    commit: Option<&str>,
    machine: &str,
) -> rusqlite::Result<()> {
    let created = report.created.as_deref().unwrap_or_default();
    to.execute(
        "INSERT INTO runs (suite, created, revision, machine, shard, verdict) VALUES (?, ?, ?, ?, ?, ?)",
        params![report.suite, created, commit, machine, report.shard, report.verdict().name()],
    )?;
    let run = to.last_insert_rowid();
    // A case that was not run has measured nothing.
    for case in report.cases.iter().filter(|case| case.attempts > 0) {
        let name = name(to, &case.id)?;
        let status = serde_json::to_value(case.status).unwrap_or_default();
        let Measures { kl, checkpoints, .. } = &case.measures;
        to.execute(
            "INSERT INTO cases (run, name, status, seconds, kl) VALUES (?, ?, ?, ?, ?)",
            params![run, name, status.as_str(), case.seconds, kl],
        )?;
        for (place, (checkpoint, [local, distance])) in checkpoints.iter().enumerate() {
            let checkpoint = self::name(to, &checkpoint.to_string())?;
            to.prepare_cached(
                "INSERT INTO measures (name, checkpoint, run, place, local, distance) VALUES (?, ?, ?, ?, ?, ?)",
            )?
            .execute(params![name, checkpoint, run, place as i64, local, distance])?;
        }
    }
    Ok(())
}

/// The number of a name, which is written once.
fn name(to: &Transaction<'_>, name: &str) -> rusqlite::Result<i64> {
    let known = to.prepare_cached("SELECT id FROM names WHERE name = ?")?.query_row([name], |row| row.get(0));
    if let Some(id) = known.optional()? {
        return Ok(id);
    }
    to.prepare_cached("INSERT INTO names (name) VALUES (?)")?.insert([name])
}
