//! All cases of one `[[case]]`, made when they are run.

use std::path::PathBuf;

use super::suite::{Case, Input};
use crate::engine::device::Device;
use crate::numerics::Numerics;

/// Stands in `fault` for the name of the fault that the case injects.
const AS_INJECTED: [&str; 2] = ["injected", "injected"];

/// All cases of one `[[case]]`: what they have in common, and the axes whose combinations they are.
pub struct Family {
    pub(super) template: Case,
    pub(super) axes: Vec<Vec<Value>>,
}

/// One value of an axis, and what it adds to a case's name where the axis has several.
pub(super) struct Value {
    pub(super) name: Option<String>,
    pub(super) setting: Setting,
}

pub(super) enum Setting {
    Model(PathBuf),
    Input(Input),
    Device(Device),
    Numerics(Numerics),
    Chunk(usize),
    Inject(parity_graph::fault::Wanted),
}

impl Setting {
    fn apply(&self, case: &mut Case) {
        match self {
            Setting::Model(path) => case.model = Some(path.clone()),
            Setting::Input(input) => case.input = input.clone(),
            Setting::Device(device) => case.device = device.clone(),
            Setting::Numerics(numerics) => case.numerics = *numerics,
            Setting::Chunk(chunk) => case.chunk = Some(*chunk),
            Setting::Inject(mistake) => {
                if case.expect.fault.as_deref().is_some_and(|fault| AS_INJECTED.contains(&fault)) {
                    case.expect.fault = Some(mistake.fault.clone());
                }
                case.inject = vec![mistake.clone()];
            }
        }
    }
}

impl Family {
    /// Number of cases; `None` where it does not fit a machine's word.
    pub fn len(&self) -> Option<usize> {
        self.axes.iter().try_fold(1usize, |product, axis| product.checked_mul(axis.len()))
    }

    /// The values of the case with this index, below [`Family::len`]: the last axis is the fastest.
    fn values(&self, mut index: usize) -> Vec<&Value> {
        let mut values: Vec<&Value> = Vec::with_capacity(self.axes.len());
        for axis in self.axes.iter().rev() {
            values.push(&axis[index % axis.len()]);
            index /= axis.len();
        }
        values.reverse();
        values
    }

    /// Name of the case with this index.
    pub fn id(&self, index: usize) -> String {
        let mut id = self.template.id.clone();
        for name in self.values(index).iter().filter_map(|value| value.name.as_deref()) {
            id.push('/');
            id += name;
        }
        id
    }

    /// The case with this index.
    pub fn case(&self, index: usize) -> Case {
        let mut case = self.template.clone();
        self.values(index).iter().for_each(|value| value.setting.apply(&mut case));
        case.id = self.id(index);
        case
    }
}
