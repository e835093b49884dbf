//! Placeholder until the tap lands.
