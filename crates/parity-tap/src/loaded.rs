//! The other way in, without preload: ggml loads the library that `GGML_BACKEND_PATH` names, and calls it. What programs and
//! libraries have bound to llama.cpp's functions by then is bound to those that stand in for them.
//!
//! Functions that a program looks up itself, and libraries that it loads later, are not reached so.

use std::ffi::c_void;

use parity_imports::{Machine, imports};
use parity_record::recorder::Host;

use crate::host::{self, Parent};
use crate::images::{self, Image, Regions};
use crate::{symbols, tap};

/// What ggml looks up in a library that it is told to load, and calls. It gets no backend: ggml says so, and goes on.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> *mut c_void {
    symbols::stay_loaded();
    tap::guarded((), || match host::asked() {
        Ok(Some(asked)) => {
            let (slots, images) = lead_here();
            let parent = Parent::new(asked.shared, true);
            parent.status("loaded", &format!("{slots} calls of {images} libraries"));
        }
        Ok(None) => host::say("nothing is recorded: that is for `parity record --load` to ask for"),
        Err(message) => host::say(message),
    });
    std::ptr::null_mut()
}

/// Binds what is bound to llama.cpp's functions to those of this library: how many slots, of how many libraries.
fn lead_here() -> (usize, usize) {
    let regions = match Regions::read() {
        Ok(regions) => regions,
        Err(error) => {
            host::say(format!("what is loaded cannot be seen: {error}"));
            return (0, 0);
        }
    };
    let mut led = (0, 0);
    for image in images::all().iter().filter(|image| !symbols::is_ours_or_preloaded(&image.path)) {
        match lead(image, &regions) {
            Ok(0) => {}
            Ok(slots) => led = (led.0 + slots, led.1 + 1),
            Err(why) => {
                host::say(format!("{}: {why}: what it calls of llama.cpp is not seen", image.path.display()));
            }
        }
    }
    led
}

fn lead(image: &Image, regions: &Regions) -> Result<usize, String> {
    let file = image.file()?;
    let machine = Machine::HOST.ok_or("its processor is not known")?;
    let imports = imports(&file, machine).map_err(|why| why.to_string())?;
    let mut led = 0;
    for slot in imports.slots {
        let Some(function) = symbols::stand_in(slot.name) else { continue };
        // SAFETY: the file is the one that was loaded, and says that the loader fills this word with a function's address.
        unsafe { regions.put(image.address(slot.offset), function as usize) }
            .map_err(|e| format!("{}: {e}", slot.name))?;
        led += 1;
    }
    Ok(led)
}
