//! What is done when the process exits and its status is known.

use std::ffi::c_void;

/// What to do with the status.
pub(crate) type AtExit = Box<dyn FnOnce(i32)>;

#[cfg(target_env = "gnu")]
unsafe extern "C" {
    /// glibc's: as `atexit`, and the function is told the status. 0 if it is noted.
    fn on_exit(function: extern "C" fn(i32, *mut c_void), argument: *mut c_void) -> i32;
}

/// Calls `end` with the status that the process exits with. Where the system does not tell it, the status counts as that
/// of a failure, and `end` is called at once.
pub(crate) fn with_status(end: AtExit) {
    let end = Box::into_raw(Box::new(end)).cast::<c_void>();
    #[cfg(target_env = "gnu")]
    // SAFETY: `ended` takes what `end` points to, once.
    if unsafe { on_exit(ended, end) } == 0 {
        return;
    }
    ended(1, end);
}

extern "C" fn ended(status: i32, end: *mut c_void) {
    // SAFETY: `with_status` made it of a box, and gives it away once.
    let end = unsafe { Box::from_raw(end.cast::<AtExit>()) };
    // Nothing may unwind into the C library.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| end(status)));
}
