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

// relayStream is the stream of a relay. To the machine each of its sessions is a rank's connection.
type relayStream struct {
	wire   grpc.BidiStreamingServer[torchftpb.RelayRequests, torchftpb.RelayResponses]
	server *Server
	out    *outbox
	parent string

	mu       sync.Mutex
	finished bool // takes no further session
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

// take takes what a rank says; false: there are too many ranks.
func (r *relayStream) take(ctx context.Context, req *torchftpb.RelayRequest) bool {
	r.mu.Lock()
	session := r.sessions[req.GetSession()]
	switch {
	case session != nil:
	case req.GetRequest() == nil || r.finished: // it never asked, or asks too late for an answer
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

// end ends a session as the end of its rank's connection does.
func (r *relayStream) end(session *openSession) {
	r.mu.Lock()
	delete(r.sessions, session.number)
	r.mu.Unlock()
	r.server.connectionEnded(session.conn)
	session.finish()
}

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

// mostNamed bounds how many groups the answers of one message name together: each costs some 130 bytes, and at most a few times
// rpc.MaxReplicaID, of the rpc.MaxMessage that a relay takes. To count them costs less than to measure the answers.
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

func (r *relayStream) sendTogether(answers []*sessionCall) {
	message := &torchftpb.RelayResponses{Responses: make([]*torchftpb.RelayResponse, len(answers))}
	for i, call := range answers {
		message.Responses[i] = &torchftpb.RelayResponse{Session: call.session.number}
		if call.kind != cutCall {
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
