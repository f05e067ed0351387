//! Every message, changed in every way, is refused; what is in order is not.

use super::*;
use proptest::collection::vec;
use proptest::prelude::*;

const LISTENER: Rank = Rank(2);
const DIALER: Rank = Rank(5);
const LANE: u32 = 3;

fn member(rank: Rank) -> Member {
    Member {
        rank,
        ranks: 8,
        lanes: 4,
        job_id: *b"0123456789abcdef",
        secret: b"a secret".to_vec(),
        encrypt: false,
    }
}

/// Feeds `bytes` in pieces of at most `piece_bytes`, as a driver does; stops at the first step that is not "wait".
fn listen(machine: &mut Listener, member: &Member, mut bytes: &[u8], piece_bytes: usize) -> ListenerStep {
    while !bytes.is_empty() && machine.wanted() > 0 {
        let (piece, rest) = bytes.split_at(piece_bytes.min(machine.wanted()).min(bytes.len()));
        bytes = rest;
        match machine.receive(member, piece) {
            ListenerStep::Wait => {}
            step => return step,
        }
    }
    ListenerStep::Wait
}

fn dial(machine: &mut Dialer, member: &Member, mut bytes: &[u8], piece_bytes: usize) -> DialerStep {
    while !bytes.is_empty() && machine.wanted() > 0 {
        let (piece, rest) = bytes.split_at(piece_bytes.min(machine.wanted()).min(bytes.len()));
        bytes = rest;
        match machine.receive(member, piece) {
            DialerStep::Wait => {}
            step => return step,
        }
    }
    DialerStep::Wait
}

/// What is said in one handshake.
struct Exchange {
    hello: HandshakeMessage,
    challenge: ListenerStep,
    proof: DialerStep,
    verdict: ListenerStep,
}

fn shake(dialer: &Member, listener: &Member, nonces: [Nonce; 2], piece_bytes: usize) -> Exchange {
    let (mut near, hello) = Dialer::new(dialer, LISTENER, LANE, &nonces[0]);
    let mut far = Listener::new(nonces[1]);
    let challenge = listen(&mut far, listener, hello.as_bytes(), piece_bytes);
    let (mut proof, mut verdict) = (DialerStep::Wait, ListenerStep::Wait);
    if let ListenerStep::Challenge(message) = challenge {
        proof = dial(&mut near, dialer, message.as_bytes(), piece_bytes);
    }
    if let DialerStep::Prove(message) = proof {
        verdict = listen(&mut far, listener, message.as_bytes(), piece_bytes);
        assert_eq!(far.wanted(), 0);
        assert_eq!(
            dial(&mut near, dialer, HandshakeMessage::accept().as_bytes(), piece_bytes),
            DialerStep::Accepted
        );
        assert_eq!(near.wanted(), 0);
    }
    Exchange { hello, challenge, proof, verdict }
}

const WELCOME: ListenerStep = ListenerStep::Authenticated { from: DIALER, lane: LANE };

fn prove(step: DialerStep) -> HandshakeMessage {
    let DialerStep::Prove(message) = step else { panic!("no proof: {step:?}") };
    message
}

fn challenge(step: ListenerStep) -> HandshakeMessage {
    let ListenerStep::Challenge(message) = step else { panic!("no challenge: {step:?}") };
    message
}

fn listener_says(dialer: &Member) -> ListenerStep {
    shake(dialer, &member(LISTENER), [[1; 32], [2; 32]], 1000).challenge
}

#[test]
fn every_mistake_has_its_refusal() {
    let other = |change: fn(&mut Member)| {
        let mut dialer = member(DIALER);
        change(&mut dialer);
        listener_says(&dialer)
    };
    assert_eq!(other(|m| m.job_id[0] ^= 1), ListenerStep::Refused(Status::WrongJob));
    assert_eq!(other(|m| m.rank = Rank(8)), ListenerStep::Refused(Status::UnknownRankOrLane));
    assert_eq!(other(|m| m.rank = LISTENER), ListenerStep::Refused(Status::UnknownRankOrLane));
    let say = |at: usize, bytes: &[u8]| {
        let (_, hello) = Dialer::new(&member(DIALER), LISTENER, LANE, &[1; 32]);
        let mut hello = hello.as_bytes().to_vec();
        hello[at..at + bytes.len()].copy_from_slice(bytes);
        listen(&mut Listener::new([2; 32]), &member(LISTENER), &hello, 1000)
    };
    assert_eq!(say(TO_AT, &[7]), ListenerStep::Refused(Status::UnknownRankOrLane));
    assert_eq!(say(LANE_AT, &[4]), ListenerStep::Refused(Status::UnknownRankOrLane));
    assert_eq!(say(VERSION_AT, &(VERSION + 1).to_le_bytes()), ListenerStep::Refused(Status::WrongVersion));
    assert_eq!(say(0, b"GET / HTTP/1.1"), ListenerStep::Refused(Status::WrongMagic));
}

#[test]
fn a_shorter_message_of_another_version_is_refused_at_once() {
    let mut machine = Listener::new([2; 32]);
    let bytes = [MAGIC.as_slice(), &[9, 0]].concat();
    assert_eq!(machine.receive(&member(LISTENER), &bytes), ListenerStep::Refused(Status::WrongVersion));
}

#[test]
fn another_secret_fails_on_both_sides() {
    let mut dialer = member(DIALER);
    dialer.secret.push(0);
    let exchange = shake(&dialer, &member(LISTENER), [[1; 32], [2; 32]], 1000);
    assert_eq!(exchange.proof, DialerStep::Failed(DialFailure::ListenerUnproven));
    // One that goes on regardless.
    let mut far = Listener::new([2; 32]);
    listen(&mut far, &member(LISTENER), exchange.hello.as_bytes(), 1000);
    let refused = ListenerStep::Refused(Status::AuthenticationFailed);
    assert_eq!(listen(&mut far, &member(LISTENER), &[0; PROOF_BYTES], 1000), refused);
}

#[test]
fn a_listener_cannot_be_made_to_prove_for_the_dialer() {
    // Reflection: what rank 2 says as the listener is offered to it as the dialer's proof.
    let exchange = shake(&member(DIALER), &member(LISTENER), [[1; 32], [2; 32]], 1000);
    let mut far = Listener::new([2; 32]);
    listen(&mut far, &member(LISTENER), exchange.hello.as_bytes(), 1000);
    let reflected = &challenge(exchange.challenge).as_bytes()[1 + NONCE_BYTES..].to_vec();
    let refused = ListenerStep::Refused(Status::AuthenticationFailed);
    assert_eq!(listen(&mut far, &member(LISTENER), reflected, 1000), refused);
}

#[test]
fn a_refusal_is_understood_in_both_places() {
    for status in &Status::ALL[1..] {
        let refusal = HandshakeMessage::refusal(*status);
        let expected = DialerStep::Failed(DialFailure::Refused { status: *status, version: VERSION });
        let (mut early, _) = Dialer::new(&member(DIALER), LISTENER, LANE, &[1; 32]);
        assert_eq!(dial(&mut early, &member(DIALER), refusal.as_bytes(), 1), expected);
        let (mut late, hello) = Dialer::new(&member(DIALER), LISTENER, LANE, &[1; 32]);
        let said = listen(&mut Listener::new([2; 32]), &member(LISTENER), hello.as_bytes(), 1000);
        prove(dial(&mut late, &member(DIALER), challenge(said).as_bytes(), 1000));
        assert_eq!(dial(&mut late, &member(DIALER), refusal.as_bytes(), 2), expected);
    }
}

proptest! {
    #[test]
    fn members_agree_however_the_bytes_are_cut(near: Nonce, far: Nonce, piece_bytes in 1usize..100) {
        let exchange = shake(&member(DIALER), &member(LISTENER), [near, far], piece_bytes);
        prop_assert_eq!(exchange.verdict, WELCOME);
    }

    #[test]
    fn a_changed_bit_anywhere_is_refused(
        near: Nonce,
        far: Nonce,
        message in 0usize..3,
        at: prop::sample::Index,
        bit in 0u8..8,
    ) {
        let flip = |message: HandshakeMessage| {
            let mut bytes = message.as_bytes().to_vec();
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            bytes
        };
        let (dialer, listener) = (member(DIALER), member(LISTENER));
        let honest = shake(&dialer, &listener, [near, far], 1000);
        let mut machine = Listener::new(far);
        match message {
            0 => {
                // Either the listener objects, or the dialer does because both macs cover what the listener saw, or
                // the listener does because the proof is for what the dialer said.
                let step = listen(&mut machine, &listener, &flip(honest.hello), 1000);
                if let ListenerStep::Challenge(said) = step {
                    let (mut near, _) = Dialer::new(&dialer, LISTENER, LANE, &near);
                    let unproven = DialerStep::Failed(DialFailure::ListenerUnproven);
                    prop_assert_eq!(dial(&mut near, &dialer, said.as_bytes(), 1000), unproven);
                    let refused = ListenerStep::Refused(Status::AuthenticationFailed);
                    prop_assert_eq!(listen(&mut machine, &listener, prove(honest.proof).as_bytes(), 1000), refused);
                } else {
                    prop_assert!(matches!(step, ListenerStep::Refused(_)));
                }
            }
            1 => {
                let (mut near, _) = Dialer::new(&dialer, LISTENER, LANE, &near);
                let step = dial(&mut near, &dialer, &flip(challenge(honest.challenge)), 1000);
                prop_assert!(matches!(step, DialerStep::Failed(_)), "{:?}", step);
            }
            _ => {
                listen(&mut machine, &listener, honest.hello.as_bytes(), 1000);
                let step = listen(&mut machine, &listener, &flip(prove(honest.proof)), 1000);
                prop_assert_eq!(step, ListenerStep::Refused(Status::AuthenticationFailed));
            }
        }
    }

    #[test]
    fn a_replay_is_refused_on_both_sides(near: Nonce, far: Nonce, fresh: Nonce) {
        prop_assume!(fresh != near && fresh != far);
        let (dialer, listener) = (member(DIALER), member(LISTENER));
        let recorded = shake(&dialer, &listener, [near, far], 1000);
        let mut machine = Listener::new(fresh);
        listen(&mut machine, &listener, recorded.hello.as_bytes(), 1000);
        let step = listen(&mut machine, &listener, prove(recorded.proof).as_bytes(), 1000);
        prop_assert_eq!(step, ListenerStep::Refused(Status::AuthenticationFailed));
        let (mut machine, _) = Dialer::new(&dialer, LISTENER, LANE, &fresh);
        let step = dial(&mut machine, &dialer, challenge(recorded.challenge).as_bytes(), 1000);
        prop_assert_eq!(step, DialerStep::Failed(DialFailure::ListenerUnproven));
    }

    #[test]
    fn random_bytes_never_get_in(
        bytes in vec(any::<u8>(), 0..400),
        hello: bool,
        piece_bytes in 1usize..100,
    ) {
        let mut machine = Listener::new([2; 32]);
        if hello {
            let (_, hello) = Dialer::new(&member(DIALER), LISTENER, LANE, &[1; 32]);
            listen(&mut machine, &member(LISTENER), hello.as_bytes(), 1000);
        }
        let step = listen(&mut machine, &member(LISTENER), &bytes, piece_bytes);
        prop_assert!(matches!(step, ListenerStep::Wait | ListenerStep::Refused(_)));
        let (mut machine, _) = Dialer::new(&member(DIALER), LISTENER, LANE, &[1; 32]);
        let step = dial(&mut machine, &member(DIALER), &bytes, piece_bytes);
        prop_assert!(matches!(step, DialerStep::Wait | DialerStep::Failed(_)));
    }

    /// A machine that is over, or is given more than it wants, looks at nothing and never panics.
    #[test]
    fn a_careless_driver_does_no_harm(pieces in vec(vec(any::<u8>(), 0..200), 0..5)) {
        let mut far = Listener::new([2; 32]);
        let (mut near, _) = Dialer::new(&member(DIALER), LISTENER, LANE, &[1; 32]);
        for piece in &pieces {
            let said = far.receive(&member(LISTENER), piece);
            let refused = matches!(said, ListenerStep::Wait | ListenerStep::Refused(_));
            prop_assert!(refused);
            prop_assert!(matches!(near.receive(&member(DIALER), piece), DialerStep::Wait | DialerStep::Failed(_)));
        }
    }
}

fn encrypting(rank: Rank) -> Member {
    Member { encrypt: true, ..member(rank) }
}

/// Both sides' keys, after what `change` makes of the messages; nothing if a side has refused.
fn agree(
    [dialer, listener]: [&Member; 2],
    mut change: impl FnMut(usize, HandshakeMessage) -> Vec<u8>,
) -> Option<[Option<Seal>; 2]> {
    let (mut near, hello) = Dialer::new(dialer, LISTENER, LANE, &[1; 32]);
    let mut far = Listener::new([2; 32]);
    let ListenerStep::Challenge(said) = listen(&mut far, listener, &change(0, hello), 7) else { return None };
    let DialerStep::Prove(proof) = dial(&mut near, dialer, &change(1, said), 7) else { return None };
    let verdict = listen(&mut far, listener, &change(2, proof), 7);
    (verdict == WELCOME).then(|| [near.into_seal(), far.into_seal()])
}

fn as_said(_: usize, message: HandshakeMessage) -> Vec<u8> {
    message.as_bytes().to_vec()
}

#[test]
fn both_have_keys_if_both_encrypt_and_else_there_is_no_connection() {
    let (encrypt, plain) = ([DIALER, LISTENER].map(encrypting), [DIALER, LISTENER].map(member));
    assert!(matches!(agree([&encrypt[0], &encrypt[1]], as_said), Some([Some(_), Some(_)])));
    assert!(matches!(agree([&plain[0], &plain[1]], as_said), Some([None, None])));
    assert!(agree([&encrypt[0], &plain[1]], as_said).is_none());
    assert!(agree([&plain[0], &encrypt[1]], as_said).is_none());
    let mut stranger = encrypting(DIALER);
    stranger.secret.push(0);
    assert!(agree([&stranger, &encrypt[1]], as_said).is_none());
}

proptest! {
    #[test]
    fn a_changed_bit_anywhere_gives_nobody_keys(message in 0usize..3, at: prop::sample::Index, bit in 0u8..8) {
        let flip = |number: usize, said: HandshakeMessage| {
            let mut bytes = said.as_bytes().to_vec();
            let at = at.index(bytes.len());
            bytes[at] ^= u8::from(number == message) << bit;
            bytes
        };
        prop_assert!(agree([&encrypting(DIALER), &encrypting(LISTENER)], flip).is_none());
    }
}
