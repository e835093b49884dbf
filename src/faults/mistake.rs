//! A mistake as a user writes it, where it is not known yet what the model is executed by.

use std::fmt;
use std::str::FromStr;

use super::{inject, inject_graph};
use crate::error::{Error, Result};

/// `FAULT[=ARGUMENT][#N][@PLACE]`
#[derive(Clone, Debug, PartialEq)]
pub struct Mistake(String);

impl FromStr for Mistake {
    type Err = Error;

    fn from_str(text: &str) -> Result<Mistake> {
        let mistake = Mistake(text.to_owned());
        match (mistake.in_nodes(), mistake.in_graphs()) {
            (Err(error), Err(_)) => Err(error),
            _ => Ok(mistake),
        }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Mistake {
    /// Its name in the catalogue.
    pub fn fault(&self) -> &str {
        let end = self.0.find(['=', '#', '@']).unwrap_or(self.0.len());
        self.0[..end].trim()
    }

    /// In the nodes that parity's engines execute.
    ///
    /// # Errors
    /// A place that is none of them.
    pub fn in_nodes(&self) -> Result<inject::Spec> {
        self.0.parse()
    }

    /// In a graph that is executed op by op.
    ///
    /// # Errors
    /// An argument, which mistakes in graphs do not take.
    pub fn in_graphs(&self) -> Result<inject_graph::Spec> {
        self.0.parse()
    }
}
