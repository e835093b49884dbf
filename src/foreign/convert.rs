//! A foreign dump through a map into a dump of our own, which is what everything else reads.

use std::collections::{BTreeSet, HashMap};

use parity_dump::{Checkpoint, Dump, DumpError, Kind, POSITIONS_MAX, Writer, usual_order};

use super::array::Array;
use super::map::apply::{arranged, has_heads, heads_layout, is_named};
use super::map::expression::Widths;
use super::map::pattern::Pattern;
use super::map::{Map, Shards, Target};
use super::shards::{is_unsummed, summed_by, unsummed, whole};
use super::{Foreign, Pass, RANKS};
use crate::error::{Error, Result};
use crate::memory;

/// What the ids of a pass's own numbers are called in maps.
const TOKENS: &str = "tokens";
const INPUT_IDS: &str = "input_ids";
const POSITIONS: &str = "positions";

/// One tensor of a pass that is a checkpoint.
struct Piece<'a> {
    array: &'a Array,
    id: Checkpoint,
    target: Target,
    /// What errors call the line of the map.
    place: String,
}

/// A pass through a map.
#[derive(Default)]
struct Mapped<'a> {
    pieces: Vec<Piece<'a>>,
    tokens: Option<Vec<u32>>,
    positions: Option<Vec<u32>>,
    foreign: BTreeSet<String>,
    /// Lines of the map that were used.
    used: BTreeSet<usize>,
    notes: BTreeSet<String>,
}

/// What a pass is of.
struct Rows {
    tokens: Vec<u32>,
    positions: Vec<u32>,
}

/// Writes the dump that `ranks` (one, or all of a tensor-parallel engine, in order) come to, and opens it.
///
/// # Errors
/// What the map says that a tensor does not fit; tokens that nobody gave; ranks that do not fit one another.
pub fn convert(ranks: &[Foreign], map: &Map, widths: &Widths, tokens: Option<&[u32]>) -> Result<Dump> {
    let Some(first) = ranks.first() else {
        return Err(Error::new("a dump", "has no ranks"));
    };
    let (model, widths) =
        (widths, if ranks.len() > 1 { widths.of_rank(ranks.len()) } else { widths.clone() });
    let scratch = tempfile::tempdir()
        .map_err(|e| Error::file(&std::env::temp_dir(), format!("cannot hold a copy of the dump: {e}")))?;
    let mut writer = Writer::create(scratch.path(), first.producer.clone(), first.model.clone())?;
    let mut unused: BTreeSet<usize> = map.lines.iter().map(|line| line.number).collect();
    let (mut unknown, mut notes) = (BTreeSet::new(), BTreeSet::new());
    let mut unsummed: BTreeSet<String> = BTreeSet::new();
    let mut next = 0;
    for number in 0..first.passes.len() {
        let mut mapped = Vec::with_capacity(ranks.len());
        for rank in ranks {
            let pass = rank.passes.get(number).ok_or_else(|| {
                Error::file(&rank.path, "ranks ran another number of passes")
                    .expected(first.passes.len())
                    .found(rank.passes.len())
            })?;
            let mut own = pieces(pass, map, &widths)?;
            for piece in own.pieces.iter_mut().filter(|piece| piece.target.layout.is_none()) {
                piece.target.layout = rank.layout_of(&piece.array.name, piece.id);
            }
            mapped.push(own);
        }
        let rows = rows_of(&mut mapped, first, number, next, tokens)?;
        next = rows.positions.iter().max().map_or(next, |last| *last as usize + 1);
        for one in &mut mapped {
            unused.retain(|line| !one.used.contains(line));
            unknown.append(&mut one.foreign);
            notes.append(&mut one.notes);
        }
        unsummed.extend(write_pass(&mut writer, &first.passes[number], &mapped, &rows, (model, &widths))?);
    }
    let manifest = writer.manifest_mut();
    (manifest.prompt, manifest.provenance) = (first.prompt.clone(), first.provenance.clone());
    if ranks.len() > 1 {
        manifest.provenance.insert(RANKS.to_owned(), ranks.len().to_string());
    }
    manifest.stopped = ranks.iter().find_map(|rank| rank.stopped.clone());
    match ranks.iter().all(|rank| rank.complete) {
        true => writer.finish()?,
        false => drop(writer),
    }
    let origin = first.origin(ranks.len());
    let mut dump = Dump::open(scratch.path()).map_err(|error| DumpError { path: origin.clone(), ..error })?;
    let mut said = vec![format!("read as {}, {}", first.format, map.described())];
    if ranks.len() > 1 {
        said.push(format!("{} ranks were put together", ranks.len()));
        let unsummed: Vec<String> = unsummed.into_iter().collect();
        said.extend(super::listed(
            "summands that were left out, since their sum depends on how the engine adds them up",
            &unsummed,
        ));
    }
    said.extend(notes);
    let unused = map.lines.iter().filter(|line| !map.built_in && unused.contains(&line.number));
    let unused: Vec<String> = unused.map(|line| line.pattern.text.clone()).collect();
    said.extend(super::listed("names of the map that fit no tensor", &unused));
    dump.stands_for(&origin, unknown.into_iter().collect(), said);
    Ok(dump)
}

/// What each tensor of a pass is.
fn pieces<'a>(pass: &'a Pass, map: &Map, widths: &Widths) -> Result<Mapped<'a>> {
    let mut out =
        Mapped { tokens: pass.tokens.clone(), positions: pass.positions.clone(), ..Mapped::default() };
    let mut known: HashMap<Checkpoint, (usize, String)> = HashMap::new();
    for array in &pass.arrays {
        let Some((line, numbers)) = map.find(&array.name, widths) else {
            match own_id(&array.name).filter(|own| map.lines.is_empty() || own.is_certain()) {
                Some(Own::Tokens) => out.tokens = out.tokens.take().or(unsigned(array)?),
                Some(Own::Checkpoint(id)) if !array.dtype.is_integer() || !id.kind().is_fixed() => {
                    claim(&mut known, &mut out, id, 0, array, map)?;
                    let (target, place) = (plain(id)?, array.name.clone());
                    out.pieces.push(Piece { array, id, target, place });
                }
                _ => drop(out.foreign.insert(array.name.clone())),
            }
            continue;
        };
        let place = map.place(line);
        if let Some(letter) = Map::unknown(line, widths) {
            return Err(Error::new(
                &place,
                format!("which tensor this is depends on {letter}, the model's layers"),
            )
            .found(format!("`{}`, and no model", array.name))
            .hint("give the model file: -m MODEL.gguf"));
        }
        out.used.insert(line.number);
        for target in &line.targets {
            let Some(id) = target.id.fill(&numbers) else { continue };
            match own_id(&id) {
                Some(Own::Tokens) => out.tokens = out.tokens.take().or(unsigned(array)?),
                Some(Own::Positions) => out.positions = out.positions.take().or(unsigned(array)?),
                Some(Own::Checkpoint(id)) => {
                    if claim(&mut known, &mut out, id, line.number, array, map)? {
                        out.pieces.push(Piece { array, id, target: target.clone(), place: place.clone() });
                    }
                }
                None => return Err(Error::new(&place, format!("`{id}` is no checkpoint id"))),
            }
        }
    }
    Ok(out)
}

enum Own {
    Tokens,
    Positions,
    Checkpoint(Checkpoint),
}

impl Own {
    /// Whether a name is one that nothing else is likely to have: where a map is given, it names what it knows.
    fn is_certain(&self) -> bool {
        match self {
            Own::Checkpoint(id) => id.kind().is_fixed() || id.layer_index().is_some(),
            _ => true,
        }
    }
}

/// What a name is that no map translates.
fn own_id(name: &str) -> Option<Own> {
    match name {
        TOKENS | INPUT_IDS => return Some(Own::Tokens),
        POSITIONS => return Some(Own::Positions),
        _ => {}
    }
    let id: Checkpoint = name.parse().ok()?;
    let known = id.kind().is_fixed() || id.likely_meant().is_none();
    known.then_some(Own::Checkpoint(id))
}

fn plain(id: Checkpoint) -> Result<Target> {
    let id = Pattern::parse(&id.to_string()).map_err(|why| Error::new(id, why))?;
    let (layout, transpose, columns, rows) = (None, None, None, None);
    Ok(Target { id, layout, transpose, columns, rows, scale: None, add: None, shards: None })
}

/// Whether a tensor may be a checkpoint: of two that are the same by a built-in map, the one whose line stands first; two of one
/// map of the user's are a mistake.
fn claim(
    known: &mut HashMap<Checkpoint, (usize, String)>,
    out: &mut Mapped<'_>,
    id: Checkpoint,
    line: usize,
    array: &Array,
    map: &Map,
) -> Result<bool> {
    let name = &array.name;
    let Some((other, by)) = known.get(&id).cloned() else {
        known.insert(id, (line, name.clone()));
        return Ok(true);
    };
    if map.built_in && other != line {
        // What has the id for its name is the node, whatever a map that comes with parity says of others.
        let is_first = line < other;
        let (taken, left) = if is_first { (name, &by) } else { (&by, name) };
        let is_same = out.pieces.iter().any(|piece| piece.id == id && piece.array.values() == array.values());
        if !is_same {
            out.notes.insert(format!("`{left}` is {id} as well: it was taken from `{taken}`"));
        }
        if is_first {
            out.pieces.retain(|piece| piece.id != id);
            known.insert(id, (line, name.clone()));
        }
        return Ok(is_first);
    }
    Err(Error::new(&map.origin, format!("two tensors are {id}"))
        .expected("one tensor for each checkpoint")
        .found(format!("`{by}` and `{name}`"))
        .hint("a name map gives each tensor an id of its own"))
}

fn unsigned(array: &Array) -> Result<Option<Vec<u32>>> {
    let wrong = |found: String| {
        Error::new(&array.name, "holds no token ids or positions")
            .expected("whole numbers from 0 on")
            .found(found)
    };
    if array.len() > POSITIONS_MAX {
        return Err(wrong(format!("{} of them", array.len())));
    }
    let numbers =
        array.integers().ok_or_else(|| wrong(format!("{:?}, shape {:?}", array.dtype, array.shape)))?;
    let own = numbers.iter().map(|&n| u32::try_from(n).map_err(|_| wrong(n.to_string())));
    own.collect::<Result<Vec<u32>>>().map(Some)
}

/// The tokens of a pass, and their positions.
fn rows_of(
    mapped: &mut [Mapped<'_>],
    first: &Foreign,
    number: usize,
    next: usize,
    given: Option<&[u32]>,
) -> Result<Rows> {
    let lead = &mapped[0];
    let tokens = lead.tokens.clone();
    if let Some(other) = mapped.iter().find(|other| other.tokens.is_some() && other.tokens != tokens) {
        return Err(Error::file(&first.path, "ranks ran other tokens")
            .expected(format!("{:?}", tokens.unwrap_or_default()))
            .found(format!("{:?}", other.tokens.clone().unwrap_or_default())));
    }
    if let Some(other) = mapped.iter().find(|other| other.positions != lead.positions) {
        return Err(Error::file(&first.path, "ranks ran other positions")
            .expected(format!("{:?}", lead.positions))
            .found(format!("{:?}", other.positions)));
    }
    let all = given.or(first.tokens.as_deref());
    let count = match (&lead.positions, &tokens) {
        (Some(positions), _) => positions.len(),
        (None, Some(tokens)) => tokens.len(),
        (None, None) if first.passes.len() == 1 => all.map_or(0, <[u32]>::len),
        (None, None) => rows_seen(&lead.pieces).unwrap_or(0),
    };
    let consecutive = || (next as u32..(next + count) as u32).collect();
    let positions: Vec<u32> = lead.positions.clone().unwrap_or_else(consecutive);
    let of_all = || positions.iter().map(|&p| all?.get(p as usize).copied()).collect::<Option<Vec<u32>>>();
    if let Some(beyond) = positions.iter().find(|position| **position as usize >= POSITIONS_MAX) {
        return Err(Error::file(&first.path, "has a position beyond any context")
            .expected(format!("positions below {POSITIONS_MAX}"))
            .found(beyond));
    }
    let tokens = match tokens {
        Some(tokens) if tokens.len() == positions.len() => Some(tokens),
        Some(_) => None,
        None => of_all(),
    };
    match tokens {
        Some(tokens) if !tokens.is_empty() => Ok(Rows { tokens, positions }),
        _ => Err(Error::file(&first.path, format!("has no tokens for pass {number}"))
            .expected(format!(
                "a tensor `{TOKENS}` or `{INPUT_IDS}` of whole numbers, one for each of {} rows",
                positions.len()
            ))
            .found(match all {
                Some(all) => format!("{} tokens in all", all.len()),
                None => "none".to_owned(),
            })
            .hint("--tokens 1,2,3 says of which tokens the dump is, all of them in order")),
    }
}

/// How many token rows a pass has, by the tensors that have no other axis before their last.
fn rows_seen(pieces: &[Piece<'_>]) -> Option<usize> {
    let plain = |piece: &&Piece<'_>| {
        let kind = piece.id.kind();
        piece.target.layout.is_none()
            && piece.target.transpose.is_none()
            && kind != Kind::Logits
            && !kind.is_optional()
            && !has_heads(piece.id)
            && piece.array.shape.len() >= 2
    };
    pieces.iter().find(plain).map(|piece| piece.array.shape[piece.array.shape.len() - 2])
}

/// Writes a pass, with the widths of the model and those of a rank; gives the ids that were left out, as [`whole`] says.
fn write_pass(
    writer: &mut Writer,
    pass: &Pass,
    mapped: &[Mapped<'_>],
    rows: &Rows,
    (model, widths): (&Widths, &Widths),
) -> Result<Vec<String>> {
    let mut left_out = Vec::new();
    let count = rows.positions.len();
    let ids = usual_order(mapped[0].pieces.iter().map(|piece| piece.id));
    let mut ordered: Vec<&Piece<'_>> = mapped[0].pieces.iter().collect();
    ordered.sort_by_cached_key(|piece| ids.iter().position(|id| *id == piece.id));
    let of_first = |id| ordered.iter().any(|piece| piece.id == id);
    if let Some(odd) = mapped.iter().flat_map(|rank| &rank.pieces).find(|piece| !of_first(piece.id)) {
        return Err(Error::new(odd.id, "is not on all ranks").hint("dump the same tensors on each"));
    }
    let vote = |of: fn(Checkpoint) -> bool| {
        let votes = mapped[0].pieces.iter().filter(|piece| of(piece.id) && piece.target.layout.is_none());
        votes.filter_map(|piece| heads_layout(piece.array, count)).next().unwrap_or_default()
    };
    let (heads, named) = (vote(has_heads), vote(is_named));
    let parts_of = |id: Checkpoint| -> Result<Vec<Array>> {
        let of_rank = |rank: &Mapped<'_>| {
            let own = rank.pieces.iter().find(|own| own.id == id);
            let own = own
                .ok_or_else(|| Error::new(id, "is not on all ranks").hint("dump the same tensors on each"))?;
            let listed = listed_rows(pass, own, &rows.positions)?;
            let expected = listed.map_or(count, |listed| listed.len());
            let heads = if is_named(own.id) { named } else { heads };
            arranged(own.array, own.id, &own.target, expected, heads, widths, &own.place)
        };
        mapped.iter().map(of_rank).collect()
    };
    writer.begin_step(&rows.tokens, &rows.positions, ordered.len())?;
    for piece in ordered {
        let parts = parts_of(piece.id)?;
        let bytes: usize = parts.iter().map(|part| part.len() * part.dtype.element().size()).sum();
        memory::require(
            &piece.array.name,
            &[("its values, in the order of a dump", bytes as u64)],
            "dump fewer tokens, or convert it tensor by tensor (docs/dumps.md)",
        )?;
        let way = piece.target.shards.filter(|_| mapped.len() > 1);
        let tensor = match parts.len() {
            1 => whole(piece.id, &parts, Some(Shards::First), model, &piece.place)?,
            _ => whole(piece.id, &parts, way, model, &piece.place).map_err(|error| {
                let summands = summed_by(piece.id)
                    .filter(|summed| parts_of(*summed).is_ok_and(|summands| is_unsummed(&parts, &summands)));
                summands.map_or(error, |summed| unsummed(piece.id, summed, &piece.place))
            })?,
        };
        let Some(tensor) = tensor else {
            left_out.push(piece.id.to_string());
            continue;
        };
        let axis = usize::from(piece.id.kind().is_optional());
        let mut positions = listed_rows(pass, piece, &rows.positions)?;
        if positions.is_none() && tensor.shape.get(axis) == Some(&1) && count > 1 {
            positions = rows.positions.last().map(|last| vec![*last]);
        }
        writer.tensor(piece.id, tensor.element, &tensor.shape, &tensor.bytes, positions.as_deref())?;
    }
    writer.end_step()?;
    Ok(left_out)
}

/// The positions that a tensor has, where these are not all of the pass.
fn listed_rows(pass: &Pass, piece: &Piece<'_>, positions: &[u32]) -> Result<Option<Vec<u32>>> {
    if let Some(listed) = pass.rows.get(&piece.array.name) {
        return Ok(Some(listed.clone()));
    }
    let Some(rows) = &piece.target.rows else { return Ok(None) };
    let count = positions.len() as i64;
    let place = |row: &i64| {
        let index = if *row < 0 { count + row } else { *row };
        usize::try_from(index).ok().and_then(|index| positions.get(index).copied()).ok_or_else(|| {
            Error::new(&piece.place, "names a row that the pass does not have")
                .expected(format!("0 to {}, or from the end -1 to -{count}", count - 1))
                .found(row)
        })
    };
    rows.iter().map(place).collect::<Result<Vec<u32>>>().map(Some)
}
