//! What each tensor of a file was made of, and whether that is what it should have been made of.

use std::collections::BTreeMap;

use super::folder::Folder;
use super::measure::{Distance, sample, some, whole};
use super::names::{self, Part, Place, Wanted};
use super::sources::{Heads, How, Slice, Source, sources};
use super::view::Order;
use crate::gguf::{Gguf, TensorRef};

/// What a tensor, or one expert of it, was made of.
pub struct Made<'a> {
    /// The source whose values it has, or else the one that its name asks for.
    pub source: Source<'a>,
    /// How far the values are from it.
    pub distance: Distance,
    /// Whether that source is the one that its name asks for.
    pub by_name: bool,
}

/// Slices for whose values the whole folder is looked through.
const SEARCHED_MAX: usize = 64;

/// Finds what tensors were made of.
pub struct Finder<'a> {
    folder: &'a Folder,
    heads: Option<Heads>,
    architecture: &'a str,
    /// By module and layer.
    places: BTreeMap<(String, bool, Option<u32>), Vec<&'a str>>,
    searched: usize,
}

impl<'a> Finder<'a> {
    /// Sorts the names of a folder.
    pub fn new(folder: &'a Folder, gguf: &Gguf, architecture: &'a str) -> Finder<'a> {
        let mut places: BTreeMap<(String, bool, Option<u32>), Vec<&str>> = BTreeMap::new();
        for (name, _) in folder.tensors() {
            let place = Place::of(name);
            if !names::is_beside(name, &place) {
                let (module, bias) = place.module();
                places.entry((module, bias, place.layer)).or_default().push(name);
            }
        }
        Finder { folder, heads: Heads::of(gguf, architecture), architecture, places, searched: 0 }
    }

    /// What a tensor was made of, expert by expert where it holds several; nothing where no name of the folder fits
    /// and no values do.
    pub fn made_of(&mut self, tensor: TensorRef<'_>) -> Vec<Option<Made<'a>>> {
        let (role, layer, bias) = names::role(&tensor.info.name);
        let shape = &tensor.info.shape;
        let experts = role.ends_with("_exps") && shape.len() >= 2;
        let slices = if experts { shape[0] } else { 1 };
        let rows = tensor.rows() / slices.max(1);
        (0..slices)
            .map(|number| {
                let expert = experts.then_some((number, slices));
                let slice = Slice { role, shape: [rows, tensor.cols()], expert };
                self.slice(tensor, number * rows, &slice, (layer, bias))
            })
            .collect()
    }

    fn slice(
        &mut self,
        tensor: TensorRef<'_>,
        first: usize,
        slice: &Slice<'_>,
        (layer, bias): (Option<u32>, bool),
    ) -> Option<Made<'a>> {
        let named = self.named(slice, layer, bias);
        let by_name = best(tensor, first, &self.wanted_first(slice.role, named));
        if let Some((source, true)) = by_name {
            let distance = whole(tensor, first, &source.view);
            return Some(Made { source, distance, by_name: true });
        }
        let other = (self.searched < SEARCHED_MAX).then(|| self.elsewhere(tensor, first, slice)).flatten();
        self.searched += 1;
        let (source, by_name) = match (other, by_name) {
            (Some(source), _) => (source, false),
            (None, Some((source, _))) => (source, true),
            (None, None) => return None,
        };
        Some(Made { source, distance: whole(tensor, first, &source.view), by_name })
    }

    /// What the names of a tensor's modules offer.
    fn named(&self, slice: &Slice<'_>, layer: Option<u32>, bias: bool) -> Vec<Source<'a>> {
        let mut out = Vec::new();
        for &(module, part) in names::modules(slice.role) {
            let Some(found) = self.places.get(&(module.to_owned(), bias, layer)) else { continue };
            let of_expert = found.iter().filter(|name| match (Place::of(name).expert, slice.expert) {
                (Some(own), Some((number, _))) => own == number,
                (Some(_), None) => false,
                (None, _) => true,
            });
            for name in of_expert {
                out.extend(self.of(name, part, slice));
            }
        }
        out
    }

    fn of(&self, name: &'a str, part: Part, slice: &Slice<'_>) -> Vec<Source<'a>> {
        let stored = self.folder.get(name);
        stored.map_or_else(Vec::new, |stored| sources(self.folder, (name, stored), part, slice, self.heads))
    }

    /// Where values do not tell two arrangements apart, it is the wanted one.
    fn wanted_first(&self, role: &str, mut found: Vec<Source<'a>>) -> Vec<Source<'a>> {
        if let Some(wanted) = names::wanted(self.architecture, role) {
            found.sort_by_key(|source| !source.how.is(wanted));
        }
        found
    }

    /// A tensor of the folder that has these values, wherever it belongs: the same module first.
    fn elsewhere(&self, tensor: TensorRef<'_>, first: usize, slice: &Slice<'_>) -> Option<Source<'a>> {
        const PARTS: [Part; 8] = [
            Part::Whole,
            Part::Half(0),
            Part::Half(1),
            Part::Alternate(0),
            Part::Alternate(1),
            Part::Qkv(0),
            Part::Qkv(1),
            Part::Qkv(2),
        ];
        let own = names::modules(slice.role);
        let mut all: Vec<_> =
            self.places.iter().flat_map(|(key, names)| names.iter().map(move |name| (key, *name))).collect();
        all.sort_by_key(|((module, ..), _)| !own.iter().any(|(known, _)| known == module));
        let rows = sample(slice.shape[0]);
        for (_, name) in all {
            // Of stacked experts each is looked at.
            let experts = match slice.expert {
                Some((_, all)) if Place::of(name).expert.is_none() => all,
                _ => 1,
            };
            for part in PARTS {
                for number in 0..experts {
                    let expert = slice.expert.map(|(own, all)| (if experts > 1 { number } else { own }, all));
                    let slice = Slice { expert, ..*slice };
                    let found = self.of(name, part, &slice).into_iter().find(|source| {
                        some(tensor, first, &source.view, rows.iter().copied().take(1)).is_explained()
                            && tells(tensor, first, source, &rows)
                    });
                    if found.is_some() {
                        return found;
                    }
                }
            }
        }
        None
    }
}

/// Whether the values of a sample are those of a source, and not of anything: zeros are everybody's.
fn tells(tensor: TensorRef<'_>, first: usize, source: &Source<'_>, rows: &[usize]) -> bool {
    let distance = some(tensor, first, &source.view, rows.iter().copied());
    distance.is_explained() && distance.size > 0.0
}

/// The first source whose values explain a sample of rows, or else the nearest; and whether they do.
fn best<'a>(tensor: TensorRef<'_>, first: usize, found: &[Source<'a>]) -> Option<(Source<'a>, bool)> {
    let mut nearest: Option<(f64, Source<'a>)> = None;
    for source in found {
        let distance = some(tensor, first, &source.view, sample(source.view.shape[0]));
        if distance.is_explained() {
            return Some((*source, true));
        }
        let far = distance.rel_l2();
        if nearest.as_ref().is_none_or(|(least, _)| far < *least) {
            nearest = Some((far, *source));
        }
    }
    nearest.map(|(_, source)| (source, false))
}

/// A mistake in a conversion.
pub struct Mistake {
    /// Its name in the catalogue, where it has one.
    pub fault: Option<&'static str>,
    /// What is wrong.
    pub text: String,
}

/// The mistakes in what one tensor was made of. `usual` is how most tensors of its role lie in the file.
pub fn mistakes(architecture: &str, tensor: TensorRef<'_>, made: &[Made<'_>], usual: How) -> Vec<Mistake> {
    let (role, layer, _) = names::role(&tensor.info.name);
    let mut out: Vec<Mistake> = Vec::new();
    let mut exchanged: Vec<String> = Vec::new();
    for (number, made) in made.iter().enumerate() {
        let place = Place::of(made.source.name);
        if !made.by_name {
            let own = names::modules(role).iter().any(|(module, _)| *module == place.module().0);
            if own && place.layer == layer && made.source.expert.is_some() {
                let from = made.source.expert.unwrap_or_default();
                exchanged.push(format!("expert {number} holds the weights of expert {from}"));
                continue;
            }
            out.push(elsewhere(role, own && place.layer != layer, &made.source));
        } else if !made.distance.is_explained() {
            out.push(differs(tensor, made));
        } else {
            out.extend(rearranged(architecture, role, made.source.how, usual));
        }
        // One is enough of many experts.
        if !out.is_empty() {
            break;
        }
    }
    if !exchanged.is_empty() {
        out.push(Mistake { fault: Some("moe.expert_index"), text: exchanged.join(", ") });
    }
    out
}

fn elsewhere(role: &str, other_layer: bool, source: &Source<'_>) -> Mistake {
    let norm = role.ends_with("norm");
    let fault = match (other_layer, norm) {
        (true, true) => "norm.wrong_layer",
        (true, false) => "linear.wrong_layer",
        (false, true) => "norm.wrong_weight",
        (false, false) => "linear.wrong_weight",
    };
    let part = source.part.text();
    let sep = if part.is_empty() { "" } else { " " };
    let expert = source.expert.map_or(String::new(), |expert| format!(", expert {expert}"));
    Mistake { fault: Some(fault), text: format!("holds {part}{sep}{}{expert}", source.name) }
}

fn differs(tensor: TensorRef<'_>, made: &Made<'_>) -> Mistake {
    let Distance { rows, rows_beyond, .. } = made.distance;
    let text = format!(
        "is not {}: {rows_beyond} of {rows} rows are further from it than {} explains, {:.1e} in all",
        made.source.name,
        tensor.info.dtype,
        made.distance.rel_l2()
    );
    Mistake { fault: None, text }
}

/// Values that are right and lie as the architecture's files, or the other layers, do not have them.
fn rearranged(architecture: &str, role: &str, how: How, usual: How) -> Option<Mistake> {
    let wanted = names::wanted(architecture, role);
    let fits = wanted.map_or(how.order == usual.order && how.add == usual.add, |wanted| how.is(wanted));
    if how.transposed != usual.transposed {
        let text = match how.transposed {
            true => "is transposed: rows and columns are exchanged",
            false => "is as it is stored, where the other layers are transposed",
        };
        return Some(Mistake { fault: Some("linear.transposed"), text: text.to_owned() });
    }
    if fits {
        return None;
    }
    let rest = match wanted {
        Some(_) => format!("files of {architecture} have them otherwise"),
        None => "the other layers have them otherwise".to_owned(),
    };
    let (fault, text) = match (wanted, how.order, how.add) {
        (Some(Wanted::Pairs), Order::AsStored, _) => (
            "linear.qk_permuted",
            format!(
                "the rows of every head are in Hugging Face's order: {architecture} needs pairs side by side"
            ),
        ),
        (Some(Wanted::PlusOne), _, 0) => {
            ("norm.unit_offset", format!("holds w: the norms of {architecture} hold 1 + w"))
        }
        (_, Order::Pairs(_) | Order::Halves(_), _) => {
            ("linear.qk_permuted", format!("the rows of every head are reordered ({}): {rest}", how.text()))
        }
        (_, _, 1 | -1) => ("norm.unit_offset", format!("holds {}: {rest}", how.text())),
        _ => ("linear.qk_permuted", format!("the rows of every head are as they are stored: {rest}")),
    };
    Some(Mistake { fault: Some(fault), text })
}
