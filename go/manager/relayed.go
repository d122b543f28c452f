package manager

import (
	"context"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/torchftpb"
)

// Relay serves the sessions of a relay's ranks.
func (s sessions) Relay(stream grpc.BidiStreamingServer[torchftpb.RelayRequests, torchftpb.RelayResponses]) error {
	if err := stream.Send(&torchftpb.RelayResponses{}); err != nil {
		return err
	}
	ctx, out, server := stream.Context(), newOutbox(), s.service.server
	return server.carry(ctx, out, &relayStream{wire: stream, server: server, out: out, parent: tracing.Incoming(ctx), sessions: map[uint64]*openSession{}})
}

// relayStream is the stream of a relay. The machine treats each of its sessions as the connection of a rank.
type relayStream struct {
	wire   grpc.BidiStreamingServer[torchftpb.RelayRequests, torchftpb.RelayResponses]
	server *Server
	out    *outbox
	parent string

	mu       sync.Mutex
	finished bool // no further session is accepted
	sessions map[uint64]*openSession
}

func (r *relayStream) receive(ctx context.Context) error {
	for {
		message, err := r.wire.Recv()
		if err != nil {
			return err
		}
		for _, req := range message.GetRequests() {
			if !r.take(ctx, req) {
				return status.Errorf(codes.ResourceExhausted, "a relay has more sessions than twice the world size of %d", r.server.cfg.WorldSize)
			}
		}
	}
}

// take handles a request of a rank. It returns false if the relay has too many sessions: each of them costs memory, and nothing
// else bounds their number.
func (r *relayStream) take(ctx context.Context, req *torchftpb.RelayRequest) bool {
	r.mu.Lock()
	session := r.sessions[req.GetSession()]
	switch {
	case session != nil:
	case req.GetRequest() == nil || r.finished: // an unknown session ends, or its request comes after finish, and cannot be answered
		r.mu.Unlock()
		return true
	case int64(len(r.sessions)) >= 2*r.server.cfg.WorldSize:
		r.mu.Unlock()
		return false
	default:
		session = newSession(r.server, r.out, &connection{}, r.parent)
		session.number = req.GetSession()
		r.sessions[session.number] = session
	}
	r.mu.Unlock()
	if req.GetRequest() == nil || !session.take(ctx, req.GetRequest()) {
		r.end(session)
		if req.GetRequest() != nil {
			r.out.add(&sessionCall{session: session, rankCall: rankCall{kind: cutCall}})
		}
	}
	return true
}

// end ends a session, as if the connection of its rank had broken.
func (r *relayStream) end(session *openSession) {
	r.mu.Lock()
	delete(r.sessions, session.number)
	r.mu.Unlock()
	r.server.connectionEnded(session.conn)
	session.finish()
}

// finish ends all sessions when the stream has ended.
func (r *relayStream) finish() {
	r.mu.Lock()
	r.finished = true
	open := make([]*openSession, 0, len(r.sessions))
	for _, session := range r.sessions {
		open = append(open, session)
	}
	r.mu.Unlock()
	for _, session := range open {
		r.end(session)
	}
}

// mostNamed bounds the replica ids in the answers of one message, so that the message stays below rpc.MaxMessage, the largest that
// a relay accepts. An id usually costs about 130 bytes, and at most a few times rpc.MaxReplicaID. Ids are counted because that is
// cheaper than to measure the encoded answers.
const mostNamed = 100_000

func (r *relayStream) send(answers []*sessionCall) {
	for len(answers) > 0 {
		n, named := 0, 0
		for ; n < len(answers); n++ {
			if result := answers[n].answer.result; result != nil {
				named += len(result.ReplicaIDs)
			}
			if n > 0 && named > mostNamed {
				break
			}
		}
		r.sendTogether(answers[:n])
		answers = answers[n:]
	}
}

// Sending fails only if the stream has broken: receive returns then.

func (r *relayStream) sendTogether(answers []*sessionCall) {
	message := &torchftpb.RelayResponses{Responses: make([]*torchftpb.RelayResponse, len(answers))}
	for i, call := range answers {
		message.Responses[i] = &torchftpb.RelayResponse{Session: call.session.number}
		if call.kind != cutCall { // without a response, the message reports to the relay that the session has been ended
			message.Responses[i].Response = call.response()
		}
	}
	_ = r.wire.Send(message)
	for _, call := range answers {
		call.sent()
	}
}

func (r *relayStream) notify(n *torchftpb.RankResponse) {
	_ = r.wire.Send(&torchftpb.RelayResponses{Responses: []*torchftpb.RelayResponse{{Response: n}}})
}
