//! How fast a step can be, whoever schedules it: the limits that measurements and predictions are compared with.
//!
//! A step is a chain: backward computes the layers from the last to the first, and forward computes them again from the
//! first to the last. Layer l is synchronised after its backward and before its forward, and the wire carries one layer
//! at a time: c_l seconds on the busiest direction of a network interface. With forward f and backward b of each layer,
//!
//! ```text
//! T*       = max over j of [ sum over k >= j of (b_k + f_k)  +  sum over k <= j of c_k ],  at least sum of (b + f)
//! T_wfbp   = F + max over j of [ sum over k >= j of b_k  +  sum over k <= j of c_k ],      at least F + B
//! T_serial = F + B + C
//! ```
//!
//! T* is attained by sending the lowest layer first, preempting others (P3); T_wfbp by wait-free backpropagation with a
//! barrier before the next forward (Poseidon, section 3.1; plain DDP); T_serial by synchronising after backward.
//!
//! Omitted: latency, headers, and that an answer cannot leave before the last contribution is in.

/// One layer's share of a step, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LayerTime {
    /// Its forward.
    pub forward_s: f64,
    /// Its backward.
    pub backward_s: f64,
    /// Its synchronisation on the busiest direction of an interface.
    pub wire_s: f64,
}

/// Seconds per step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepTimes {
    /// T*, with transfers under backward and forward.
    pub ideal_s: f64,
    /// T_wfbp, with transfers under backward alone.
    pub wfbp_s: f64,
    /// T_serial, without overlap.
    pub serial_s: f64,
    /// Forward and backward of one worker alone.
    pub compute_s: f64,
}

/// The limits of one step, its layers in forward order.
#[must_use]
pub fn step_times(layers: &[LayerTime]) -> StepTimes {
    let forward_s: f64 = layers.iter().map(|layer| layer.forward_s).sum();
    let backward_s: f64 = layers.iter().map(|layer| layer.backward_s).sum();
    let wire_s: f64 = layers.iter().map(|layer| layer.wire_s).sum();
    let compute_s = forward_s + backward_s;
    let (mut ideal_s, mut last_in_s) = (compute_s, backward_s);
    let (mut forward_left_s, mut backward_done_s, mut sent_s) = (forward_s, backward_s, 0.0);
    for layer in layers {
        sent_s += layer.wire_s;
        ideal_s = ideal_s.max(backward_done_s + forward_left_s + sent_s);
        last_in_s = last_in_s.max(backward_done_s + sent_s);
        backward_done_s -= layer.backward_s;
        forward_left_s -= layer.forward_s;
    }
    StepTimes { ideal_s, wfbp_s: forward_s + last_in_s, serial_s: compute_s + wire_s, compute_s }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(forward_s: f64, backward_s: f64, wire_s: f64) -> LayerTime {
        LayerTime { forward_s, backward_s, wire_s }
    }

    #[test]
    fn the_first_layer_is_never_hidden_and_the_last_is_hidden_twice() {
        // Backward of the last, the wire, forward of the last.
        let found = step_times(&[layer(1.0, 2.0, 0.5), layer(1.0, 2.0, 100.0)]);
        assert_eq!(found.ideal_s, 2.0 + 100.5 + 1.0);
        assert_eq!(found.wfbp_s, 2.0 + 2.0 + 100.5);
        assert_eq!(found.serial_s, 106.5);
        let found = step_times(&[layer(1.0, 2.0, 0.5), layer(1.0, 2.0, 0.0)]);
        assert_eq!((found.ideal_s, found.wfbp_s, found.compute_s), (6.5, 6.5, 6.0));
        let found = step_times(&[layer(1.0, 2.0, 0.0), layer(1.0, 2.0, 2.5)]);
        assert_eq!((found.ideal_s, found.wfbp_s, found.serial_s), (6.0, 6.5, 8.5));
    }

    #[test]
    fn nothing_takes_no_time() {
        assert_eq!(step_times(&[]), StepTimes { ideal_s: 0.0, wfbp_s: 0.0, serial_s: 0.0, compute_s: 0.0 });
    }
}
