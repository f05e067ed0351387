//! Optimizers as torch computes them, element by element: what an owner does to the values that it holds.
//!
//! Formulas and the order of operations are those of torch.optim's loops over tensors (`foreach=False`), so that a run can
//! change between updates at the workers and at the owners. Every element is updated by itself: a slice of a tensor gets the
//! numbers that it would have in the whole.

use crate::types::Dtype;

/// An optimizer with its options. All numbers may change between updates, as schedulers change them, but not
/// [`Optimizer::states`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Optimizer {
    /// Learning rate.
    pub lr: f64,
    /// How much of the value is added to the gradient; decoupled, how much of the value is lost per learning rate.
    pub weight_decay: f64,
    /// Go up instead of down.
    pub maximize: bool,
    /// Which one it is.
    pub rule: Rule,
}

/// What tells optimizers apart. Names are those of torch's options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// Stochastic gradient descent.
    Sgd {
        /// 0: none is kept.
        momentum: f64,
        /// Of the gradient on its way into the momentum, from the second update on.
        dampening: f64,
        /// Nesterov's.
        nesterov: bool,
    },
    /// Adam, and `AdamW` if the weight decay is `decoupled`.
    Adam {
        /// Of the averages of the gradient and of its square.
        betas: [f64; 2],
        /// Added to the denominator.
        eps: f64,
        /// Divide by the largest average of squares so far.
        amsgrad: bool,
        /// Weight decay does not pass through the averages.
        decoupled: bool,
    },
    /// Adagrad.
    Adagrad {
        /// Of the learning rate, by update.
        lr_decay: f64,
        /// Added to the denominator.
        eps: f64,
        /// What the sums of squares begin with.
        initial: f64,
    },
    /// `RMSprop`.
    RmsProp {
        /// Of the average of squares.
        alpha: f64,
        /// Added to the denominator.
        eps: f64,
        /// 0: none is kept.
        momentum: f64,
        /// Divide by the variance instead of the average of squares.
        centered: bool,
    },
    /// Elastic averaging: what comes is not a gradient but another value, towards which this one goes by a share, which is the
    /// learning rate (MXNET-MPI, equation 2). Weight decay has no meaning.
    Elastic,
}

/// Most states that an optimizer has.
pub const STATES_MAX: usize = 3;

/// Of a value that is updated elsewhere, as much as is taken at a time.
const NEAR_BYTES: usize = 16 << 10;

/// What is to be done with the gradients of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// The optimizer, with its options of this step.
    pub optimizer: Optimizer,
    /// What gradients are multiplied by before: less than 1 if they are clipped.
    pub factor: f64,
}

/// Why an update cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Misfit {
    /// Values of this type are not updated.
    #[error("values of type {0} have no update; f32 and f64 have")]
    Dtype(&'static str),
    /// Value, gradient and states are not of one length, or not as many as there should be.
    #[error(
        "a value of {value} bytes, a gradient of {gradient}, {found} states: {states} of {value} bytes are needed"
    )]
    Lengths {
        /// Bytes of the value.
        value: usize,
        /// Bytes of the gradient.
        gradient: usize,
        /// States given.
        found: usize,
        /// States needed.
        states: usize,
    },
}

impl Optimizer {
    /// What is kept beside each value, by torch's names, in the order in which [`Optimizer::update`] takes it.
    #[must_use]
    pub fn states(&self) -> &'static [&'static str] {
        match self.rule {
            Rule::Sgd { momentum: 0.0, .. } | Rule::Elastic => &[],
            Rule::Sgd { .. } => &["momentum_buffer"],
            Rule::Adam { amsgrad: false, .. } => &["exp_avg", "exp_avg_sq"],
            Rule::Adam { amsgrad: true, .. } => &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
            Rule::Adagrad { .. } => &["sum"],
            Rule::RmsProp { momentum: 0.0, centered: false, .. } => &["square_avg"],
            Rule::RmsProp { momentum: 0.0, centered: true, .. } => &["square_avg", "grad_avg"],
            Rule::RmsProp { centered: false, .. } => &["square_avg", "momentum_buffer"],
            Rule::RmsProp { centered: true, .. } => &["square_avg", "grad_avg", "momentum_buffer"],
        }
    }

    /// What all states of a value begin with.
    #[must_use]
    pub fn initial(&self) -> f64 {
        if let Rule::Adagrad { initial, .. } = self.rule { initial } else { 0.0 }
    }
}

impl Update {
    /// Makes update number `step` of these values, from 1, with their gradient.
    ///
    /// # Errors
    /// The type has no update, or lengths do not fit.
    pub fn apply(
        &self,
        dtype: Dtype,
        step: u64,
        value: &mut [u8],
        gradient: &[u8],
        states: &mut [&mut [u8]],
    ) -> Result<(), Misfit> {
        self.check(value.len(), gradient.len(), states)?;
        match dtype {
            Dtype::F32 => self.apply_as::<f32>(step, value, gradient, states),
            Dtype::F64 => self.apply_as::<f64>(step, value, gradient, states),
            other => return Err(Misfit::Dtype(other.name())),
        }
        Ok(())
    }

    /// As [`Update::apply`], but leaves the value as it is: the new one takes the gradient's place.
    ///
    /// # Errors
    /// As there.
    pub fn apply_elsewhere(
        &self,
        dtype: Dtype,
        step: u64,
        value: &[u8],
        gradient: &mut [u8],
        states: &mut [&mut [u8]],
    ) -> Result<(), Misfit> {
        self.check(value.len(), gradient.len(), states)?;
        // Each element is updated by itself: in pieces that stay near the processor.
        let mut near = [0_u64; NEAR_BYTES / 8];
        let near: &mut [u8] = bytemuck::cast_slice_mut(&mut near);
        let count = states.len();
        for (number, value) in value.chunks(NEAR_BYTES).enumerate() {
            let (new, piece) =
                (&mut near[..value.len()], number * NEAR_BYTES..number * NEAR_BYTES + value.len());
            new.copy_from_slice(value);
            let mut pieces: [&mut [u8]; STATES_MAX] = Default::default();
            for (of_piece, state) in pieces.iter_mut().zip(&mut *states) {
                *of_piece = &mut state[piece.clone()];
            }
            self.apply(dtype, step, new, &gradient[piece.clone()], &mut pieces[..count])?;
            gradient[piece].copy_from_slice(new);
        }
        Ok(())
    }

    fn check(&self, value: usize, gradient: usize, states: &[&mut [u8]]) -> Result<(), Misfit> {
        let (found, needed) = (states.len(), self.optimizer.states().len());
        if found == needed && gradient == value && states.iter().all(|state| state.len() == value) {
            return Ok(());
        }
        Err(Misfit::Lengths { value, gradient, found, states: needed })
    }

    fn apply_as<T: Real>(&self, step: u64, value: &mut [u8], gradient: &[u8], states: &mut [&mut [u8]]) {
        let Optimizer { lr, weight_decay, maximize, rule } = self.optimizer;
        let value: &mut [T] = bytemuck::cast_slice_mut(value);
        let gradient: &[T] = bytemuck::cast_slice(gradient);
        let mut states = states.iter_mut().map(|state| bytemuck::cast_slice_mut::<u8, T>(state));
        let mut next = || states.next().unwrap_or_default();
        let decoupled = matches!(rule, Rule::Adam { decoupled: true, .. });
        let decay = T::of(if decoupled { 0.0 } else { weight_decay });
        let factor = T::of(if maximize { -self.factor } else { self.factor });
        // Without decay a value of infinity must not come near the gradient.
        let decays = weight_decay != 0.0 && !decoupled;
        let slope = |value: T, gradient: T| {
            let gradient = gradient * factor;
            if decays { gradient + decay * value } else { gradient }
        };
        let pairs = value.iter_mut().zip(gradient);
        match rule {
            Rule::Elastic => {
                // Who has pushed goes as far the other way, by the same operations: so nothing is lost between them.
                let share = T::of(lr);
                pairs.for_each(|(value, other)| *value = *value + share * (*other * factor - *value));
            }
            Rule::Sgd { momentum: 0.0, .. } => {
                let lr = T::of(lr);
                pairs.for_each(|(value, gradient)| *value = *value - lr * slope(*value, *gradient));
            }
            Rule::Sgd { momentum, dampening, nesterov } => {
                let (lr, momentum, taken) = (T::of(lr), T::of(momentum), T::of(1.0 - dampening));
                for ((value, gradient), kept) in pairs.zip(next()) {
                    let slope = slope(*value, *gradient);
                    *kept = if step == 1 { slope } else { *kept * momentum + taken * slope };
                    let way = if nesterov { slope + momentum * *kept } else { *kept };
                    *value = *value - lr * way;
                }
            }
            Rule::Adam { betas, eps, amsgrad, .. } => {
                let [one, two] = betas.map(|beta| 1.0 - power(beta, step));
                let size = T::of(lr / one);
                let (root, eps) = (T::of(two.sqrt()), T::of(eps));
                let shrink = T::of(if decoupled { 1.0 - lr * weight_decay } else { 1.0 });
                let toward = Lerp::<T>::new(1.0 - betas[0]);
                let (keep, add) = (T::of(betas[1]), T::of(1.0 - betas[1]));
                // Neither loop tests for each element what is the same for all: both are computed as vectors.
                let averages = |value: &mut T, gradient: &T, average: &mut T, square: &mut T| {
                    let slope = slope(*value, *gradient);
                    *value = *value * shrink;
                    *average = toward.step(*average, slope);
                    *square = *square * keep + add * slope * slope;
                };
                let go = |value: &mut T, average: T, most: T| {
                    *value = *value - size * average / (most.root() / root + eps);
                };
                let kept = pairs.zip(next()).zip(next());
                if amsgrad {
                    for ((((value, gradient), average), square), largest) in kept.zip(next()) {
                        averages(value, gradient, average, square);
                        *largest = largest.larger(*square);
                        go(value, *average, *largest);
                    }
                } else {
                    for (((value, gradient), average), square) in kept {
                        averages(value, gradient, average, square);
                        go(value, *average, *square);
                    }
                }
            }
            Rule::Adagrad { lr_decay, eps, .. } => {
                #[allow(clippy::cast_precision_loss)] // 2^53 updates take some time
                let size = T::of(lr / (1.0 + (step - 1) as f64 * lr_decay));
                let eps = T::of(eps);
                for ((value, gradient), sum) in pairs.zip(next()) {
                    let slope = slope(*value, *gradient);
                    *sum = *sum + slope * slope;
                    *value = *value - size * slope / (sum.root() + eps);
                }
            }
            Rule::RmsProp { alpha, eps, momentum, centered } => {
                let (lr, eps, keep) = (T::of(lr), T::of(eps), T::of(alpha));
                let (add, toward) = (T::of(1.0 - alpha), Lerp::<T>::new(1.0 - alpha));
                let momentum_of = T::of(momentum);
                let divide = |slope: T, square: &mut T, average: Option<&mut T>| {
                    *square = *square * keep + add * slope * slope;
                    let variance = average.map_or(*square, |average| {
                        *average = toward.step(*average, slope);
                        *square - *average * *average
                    });
                    slope / (variance.root() + eps)
                };
                let go = |value: &mut T, quotient: T, velocity: Option<&mut T>| {
                    *value = *value
                        - lr * velocity.map_or(quotient, |velocity| {
                            *velocity = *velocity * momentum_of + quotient;
                            *velocity
                        });
                };
                // A loop each, so that each is computed as vectors.
                let kept = pairs.zip(next());
                match (centered, momentum != 0.0) {
                    (false, false) => kept.for_each(|((value, gradient), square)| {
                        let quotient = divide(slope(*value, *gradient), square, None);
                        go(value, quotient, None);
                    }),
                    (true, false) => kept.zip(next()).for_each(|(((value, gradient), square), average)| {
                        let quotient = divide(slope(*value, *gradient), square, Some(average));
                        go(value, quotient, None);
                    }),
                    (false, true) => kept.zip(next()).for_each(|(((value, gradient), square), velocity)| {
                        let quotient = divide(slope(*value, *gradient), square, None);
                        go(value, quotient, Some(velocity));
                    }),
                    (true, true) => kept.zip(next()).zip(next()).for_each(
                        |((((value, gradient), square), average), velocity)| {
                            let quotient = divide(slope(*value, *gradient), square, Some(average));
                            go(value, quotient, Some(velocity));
                        },
                    ),
                }
            }
        }
    }
}

fn power(beta: f64, step: u64) -> f64 {
    #[allow(clippy::cast_precision_loss)]
    beta.powf(step as f64)
}

/// torch's `lerp`: the formula depends on the weight, so that weight 1 gives the end exactly.
struct Lerp<T> {
    near: bool,
    weight: T,
    rest: T,
}

impl<T: Real> Lerp<T> {
    fn new(weight: f64) -> Self {
        Self { near: weight < 0.5, weight: T::of(weight), rest: T::of(1.0 - weight) }
    }

    fn step(&self, start: T, end: T) -> T {
        if self.near { start + self.weight * (end - start) } else { end - (end - start) * self.rest }
    }
}

/// Fills memory of this type with a number.
///
/// # Errors
/// Values of the type have no update.
pub fn fill(dtype: Dtype, number: f64, memory: &mut [u8]) -> Result<(), Misfit> {
    match dtype {
        Dtype::F32 => bytemuck::cast_slice_mut(memory).fill(f32::of(number)),
        Dtype::F64 => bytemuck::cast_slice_mut(memory).fill(number),
        other => return Err(Misfit::Dtype(other.name())),
    }
    Ok(())
}

/// Partial sums of [`squares`]: as many as a processor adds at once.
const SQUARES: usize = 8;

/// The sum of the squares, in fp64: of all whose place leaves the same rest divided by 8, in order, and then of these.
///
/// # Errors
/// Values of the type have no update.
pub fn squares(dtype: Dtype, memory: &[u8]) -> Result<f64, Misfit> {
    fn sum<T: Real>(memory: &[u8]) -> f64 {
        let mut sums = [0.0; SQUARES];
        for block in bytemuck::cast_slice::<u8, T>(memory).chunks(SQUARES) {
            for (sum, number) in sums.iter_mut().zip(block) {
                *sum += number.wide() * number.wide();
            }
        }
        sums.iter().sum()
    }
    match dtype {
        Dtype::F32 => Ok(sum::<f32>(memory)),
        Dtype::F64 => Ok(sum::<f64>(memory)),
        other => Err(Misfit::Dtype(other.name())),
    }
}

/// Floating point numbers, for one body for both.
trait Real:
    bytemuck::Pod
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + 'static
{
    fn of(number: f64) -> Self;
    fn wide(self) -> f64;
    fn root(self) -> Self;
    /// NaN if either is.
    fn larger(self, other: Self) -> Self;
}

macro_rules! real {
    ($type:ty) => {
        impl Real for $type {
            #[allow(clippy::cast_possible_truncation, clippy::cast_lossless)]
            fn of(number: f64) -> Self {
                number as $type
            }

            #[allow(clippy::cast_lossless)]
            fn wide(self) -> f64 {
                self as f64
            }

            fn root(self) -> Self {
                self.sqrt()
            }

            fn larger(self, other: Self) -> Self {
                if self.is_nan() || self >= other { self } else { other }
            }
        }
    };
}

real!(f32);
real!(f64);

#[cfg(test)]
mod tests {
    use super::*;

    const SGD: Optimizer = Optimizer {
        lr: 0.5,
        weight_decay: 0.0,
        maximize: false,
        rule: Rule::Sgd { momentum: 0.5, dampening: 0.0, nesterov: false },
    };

    fn plain(optimizer: Optimizer) -> Update {
        Update { optimizer, factor: 1.0 }
    }

    fn step(
        optimizer: &Optimizer,
        number: u64,
        value: &mut [f64],
        gradient: &[f64],
        states: &mut [Vec<f64>],
    ) {
        let mut states: Vec<&mut [u8]> =
            states.iter_mut().map(|state| bytemuck::cast_slice_mut(&mut state[..])).collect();
        let (value, gradient) = (bytemuck::cast_slice_mut(value), bytemuck::cast_slice(gradient));
        plain(*optimizer).apply(Dtype::F64, number, value, gradient, &mut states).unwrap();
    }

    #[test]
    fn elsewhere_are_the_same_bits_and_the_value_stays() {
        fn bytes(numbers: &mut [f32]) -> &mut [u8] {
            bytemuck::cast_slice_mut(numbers)
        }
        let adam = Rule::Adam { betas: [0.9, 0.99], eps: 1e-8, amsgrad: false, decoupled: true };
        let update = plain(Optimizer { weight_decay: 0.1, rule: adam, ..SGD });
        for elems in [0, 1, NEAR_BYTES / 4, NEAR_BYTES / 4 + 1, 3 * NEAR_BYTES / 4 - 1] {
            let numbers =
                |by: f32| -> Vec<f32> { (0..elems).map(|at| (at as f32 * by).sin().abs()).collect() };
            let (mut value, mut gradient) = (numbers(0.1), numbers(0.7));
            let [mut one, mut two] = [numbers(0.2), numbers(0.3)];
            let (mut here, [mut three, mut four]) = (value.clone(), [one.clone(), two.clone()]);
            let states = &mut [bytes(&mut three), bytes(&mut four)];
            update.apply(Dtype::F32, 3, bytes(&mut here), bytes(&mut gradient), states).unwrap();
            let (before, states) = (value.clone(), &mut [bytes(&mut one), bytes(&mut two)]);
            let value_bytes: &[u8] = bytes(&mut value);
            update.apply_elsewhere(Dtype::F32, 3, value_bytes, bytes(&mut gradient), states).unwrap();
            assert_eq!((gradient, one, two, value), (here, three, four, before));
        }
        assert!(plain(SGD).apply_elsewhere(Dtype::F32, 1, &[0; 4], &mut [0; 8], &mut [&mut [0; 4]]).is_err());
    }

    #[test]
    fn momentum_by_hand() {
        let (mut value, mut states) = ([1.0, 2.0], [vec![0.0; 2]]);
        step(&SGD, 1, &mut value, &[1.0, -2.0], &mut states);
        assert_eq!((value, &states[0][..]), ([0.5, 3.0], &[1.0, -2.0][..]));
        step(&SGD, 2, &mut value, &[1.0, 0.0], &mut states);
        assert_eq!((value, &states[0][..]), ([-0.25, 3.5], &[1.5, -1.0][..]));
    }

    #[test]
    fn elastic_averaging_by_hand() {
        let elastic = Optimizer { lr: 0.25, rule: Rule::Elastic, ..SGD };
        let mut value = [1.0, -2.0, f64::INFINITY];
        step(&elastic, 1, &mut value, &[5.0, -2.0, 0.0], &mut []);
        assert_eq!(value[..2], [2.0, -2.0]);
        assert!(elastic.states().is_empty());
    }

    #[test]
    fn every_slice_is_updated_as_in_the_whole() {
        let rules = [
            SGD.rule,
            Rule::Elastic,
            Rule::Adam { betas: [0.9, 0.99], eps: 1e-8, amsgrad: true, decoupled: true },
            Rule::Adagrad { lr_decay: 0.1, eps: 1e-10, initial: 0.0 },
            Rule::RmsProp { alpha: 0.9, eps: 1e-8, momentum: 0.9, centered: true },
        ];
        for rule in rules {
            let optimizer = Optimizer { weight_decay: 0.01, rule, ..SGD };
            let zeros = vec![vec![0.0; 7]; optimizer.states().len()];
            let (mut whole, mut states) = ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], zeros.clone());
            let (mut left, mut right) = (whole[..3].to_vec(), whole[3..].to_vec());
            let mut of_left: Vec<_> = zeros.iter().map(|state| state[..3].to_vec()).collect();
            let mut of_right: Vec<_> = zeros.iter().map(|state| state[3..].to_vec()).collect();
            for number in 1..9 {
                let gradient: Vec<f64> =
                    (0..7).map(|at| f64::from(at * 5 % 7) - 3.0 + number as f64).collect();
                step(&optimizer, number, &mut whole, &gradient, &mut states);
                step(&optimizer, number, &mut left, &gradient[..3], &mut of_left);
                step(&optimizer, number, &mut right, &gradient[3..], &mut of_right);
            }
            assert_eq!(whole.to_vec(), [left, right].concat(), "{rule:?}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let (mut value, gradient, mut state) = ([0u8; 8], [0u8; 8], [0u8; 8]);
        assert_eq!(
            plain(SGD).apply(Dtype::I64, 1, &mut value, &gradient, &mut [&mut state]),
            Err(Misfit::Dtype("i64"))
        );
        let misfit = plain(SGD).apply(Dtype::F64, 1, &mut value, &gradient, &mut []).unwrap_err();
        assert_eq!(
            misfit.to_string(),
            "a value of 8 bytes, a gradient of 8, 0 states: 1 of 8 bytes are needed"
        );
        assert!(plain(SGD).apply(Dtype::F64, 1, &mut value, &gradient[..4], &mut [&mut state]).is_err());
        assert!(plain(SGD).apply(Dtype::F64, 1, &mut value, &gradient, &mut [&mut state[..4]]).is_err());
    }

    #[test]
    fn a_gradient_is_scaled_before_anything_else() {
        let [mut whole, mut scaled] = [[1.0f64, -3.0, 0.1]; 2];
        let mut states = [vec![0.0; 3], vec![0.0; 3]];
        let optimizer = Optimizer { weight_decay: 0.1, ..SGD };
        let [one, two] = &mut states;
        let gradient = [0.3, 0.7, -1.1];
        step(&optimizer, 1, &mut whole, &gradient.map(|g| g * 0.3), std::slice::from_mut(one));
        let (value, gradient) = (bytemuck::cast_slice_mut(&mut scaled), bytemuck::cast_slice(&gradient));
        let state: &mut [u8] = bytemuck::cast_slice_mut(&mut two[..]);
        Update { optimizer, factor: 0.3 }.apply(Dtype::F64, 1, value, gradient, &mut [state]).unwrap();
        assert_eq!(whole, scaled);
        assert_eq!(states[0], states[1]);
    }

    #[test]
    fn squares_are_summed_in_one_order() {
        let numbers: Vec<f32> = (0..21).map(|at| (at as f32) / 3.0).collect();
        let sum = squares(Dtype::F32, bytemuck::cast_slice(&numbers)).unwrap();
        let of = |rest: usize| -> f64 {
            numbers.iter().skip(rest).step_by(8).map(|x| f64::from(*x).powi(2)).sum()
        };
        assert_eq!(sum, (0..8).map(of).sum::<f64>());
        assert_eq!(squares(Dtype::I8, &[]), Err(Misfit::Dtype("i8")));
        let mut memory = [0u8; 12];
        fill(Dtype::F32, 0.5, &mut memory).unwrap();
        assert_eq!(bytemuck::cast_slice::<u8, f32>(&memory), [0.5; 3]);
    }

    #[test]
    fn a_value_that_is_not_finite_stays_alone() {
        let optimizer =
            Optimizer { rule: Rule::Sgd { momentum: 0.0, dampening: 0.0, nesterov: false }, ..SGD };
        let mut value = [f64::INFINITY, 1.0];
        step(&optimizer, 1, &mut value, &[1.0, f64::NAN], &mut []);
        assert!(value[0] == f64::INFINITY && value[1].is_nan());
    }
}
